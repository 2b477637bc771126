// Wrong command lines: exit code 2, one sentence that names the option, the value, the rule and the
// nearest legal value, and no file left behind.
#include "tests/support/cli_runner.h"

namespace moxie::test {
namespace {

struct BadUsage {
  const char* arguments;
  std::vector<std::string> parts;
};

class CliUsage : public CliTest {
 protected:
  void expect_usage_errors(const std::vector<BadUsage>& cases) const {
    for (const BadUsage& bad : cases) expect_error(bad.arguments, 2, bad.parts);
    EXPECT_TRUE(files().empty());
  }
};

TEST_F(CliUsage, UnknownWords) {
  expect_usage_errors({
      {"rnu", {"'rnu'", "did you mean 'run'"}},
      {"--ranks 4", {"--ranks", "before a verb"}},
      {"run --rank 4", {"no option --rank", "did you mean --ranks"}},
      {"run --expert=4", {"no option --expert", "did you mean --experts"}},
      {"run fast", {"no argument 'fast'"}},
      {"presets --jsn", {"no option --jsn", "--json"}},
      {"run --ranks", {"--ranks"}},
  });
}

TEST_F(CliUsage, WrongValues) {
  expect_usage_errors({
      {"run --ranks 0", {"--ranks is 0", "at least 1"}},
      {"run --ranks -3", {"--ranks is -3", "at least 1"}},
      {"run --ranks four", {"--ranks is 'four'", "whole number"}},
      {"run --ranks 4.5", {"--ranks is '4.5'", "whole number"}},
      {"run --ranks 99999999999999999999", {"--ranks", "at most"}},
      {"run --tokens 5,x,7", {"--tokens of rank 1 is 'x'"}},
      {"run --tokens 5,,7", {"--tokens of rank 1 is ''"}},
      {"run --tokens 5,-1", {"--tokens of rank 1 is -1", "at least 0"}},
      {"run --ranks 3 --tokens 5,6", {"--tokens names 2 ranks", "--ranks is 3"}},
      {"run --dtype fp8", {"--dtype is 'fp8'", "f32, bf16"}},
      {"run --order slab", {"--order is 'slab'", "did you mean 'slabs'"}},
      {"run --save zx", {"--save is 'zx'", "z+x"}},
      {"run --timeout soon", {"--timeout is 'soon'", "number"}},
      {"run --timeout -1", {"--timeout is -1", "at least 0"}},
      {"run --backend gpu", {"--backend is 'gpu'", "cuda"}},
      {"run --backend cuda --devices 0,x", {"--devices of rank 1 is 'x'", "whole number"}},
      {"run --backend cuda --cluster-size 3", {"--cluster-size is 3", "at most 2"}},
      {"run --repeat 0", {"--repeat is 0", "at least 1"}},
      {"run --routing zip", {"--routing is 'zip'", "zipf"}},
      {"run --routing uniform:3", {"--routing is 'uniform:3'"}},
      {"run --routing hot:16", {"hot expert is 16", "nearest legal value is 15"}},
      {"run --kill-rank 4", {"--kill-rank is 4", "nearest legal value is 3"}},
  });
}

TEST_F(CliUsage, IllegalShapes) {
  expect_usage_errors({
      {"run --hidden 0", {"--hidden is 0", "multiple of 64", "nearest legal value 64"}},
      {"run --hidden 100", {"--hidden is 100", "multiple of 64", "nearest legal value 128"}},
      {"run --intermediate 2881", {"--intermediate is 2881", "2880"}},
      {"run --experts 0", {"--experts is 0", "nearest legal value 1"}},
      {"run --top-k 0", {"--top-k is 0", "nearest legal value 1"}},
      {"run --top-k 17", {"--top-k is 17", "16"}},
      {"run --shared-intermediate 0 --shared-output-gate",
       {"--shared-output-gate", "--shared-intermediate"}},
      {"run --shared-intermediate 65", {"--shared-intermediate is 65", "64"}},
      {"run --preset mixtral", {"--preset 'mixtral'", "mixtral-8x7b"}},
  });
}

TEST_F(CliUsage, IllegalPlans) {
  expect_usage_errors({
      {"run --slabs 0", {"--slabs is 0", "nearest legal value 1"}},
      {"run --compute-workers 0", {"--compute-workers is 0", "nearest legal value 1"}},
      {"run --capacity-rows 100",
       {"--capacity-rows is 100", "multiple of 128", "nearest legal value 128"}},
      {"run --x-ring 1", {"--x-ring is 1", "nearest legal value"}},
      {"run --hidden-ring 4", {"--hidden-ring is 4", "slabs", "nearest legal value"}},
      {"run --order lag --lag 3 --hidden-ring 4", {"--hidden-ring is 4", "nearest legal value 32"}},
      {"run --saved-rows -2", {"--saved-rows is -2"}},
  });
}

TEST_F(CliUsage, Contradictions) {
  expect_usage_errors({
      {"run --backward --forward-only", {"--backward", "--forward-only"}},
      {"run --inputs somewhere --hidden 64", {"--inputs somewhere", "--hidden"}},
      {"run --devices 0,1", {"--devices", "add --backend cuda"}},
      {"run --reserve-sms 8", {"--reserve-sms", "add --backend cuda"}},
      {"trace", {"needs a file"}},
  });
}

TEST_F(CliUsage, WhatDoesNotFitThisMachineSaysWhatWould) {
  expect_error("run --preset kimi-k2.5 --hidden 1048576", 2, {"needs", "GB"});
  expect_error("run --experts 100000 --hidden 8192 --intermediate 8192", 2,
               {"needs", "GB", "smaller --experts"});
}

TEST_F(CliUsage, HelpAndVersion) {
  for (const char* arguments : {"", "--help", "run --help", "bench --help", "presets --help",
                                "doctor --help", "trace --help"}) {
    const CliResult result = moxie(arguments);
    EXPECT_EQ(result.code, 0) << arguments;
    EXPECT_NE(result.out.find("moxie"), std::string::npos) << arguments;
    EXPECT_EQ(result.err, "") << arguments;
  }
  EXPECT_TRUE(moxie("--version").out.starts_with("moxie "));
  const std::string help = moxie("run --help").out;
  for (const char* word :
       {"Shape", "Input", "Work", "Plan", "Results", "--tokens", "--hidden-ring", "Exit codes"}) {
    EXPECT_NE(help.find(word), std::string::npos) << word;
  }
}

}  // namespace
}  // namespace moxie::test
