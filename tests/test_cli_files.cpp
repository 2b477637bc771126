// Files that are missing, broken or of the wrong kind: exit code 1, one sentence, nothing
// half-written.
#include <nlohmann/json.hpp>

#include "tests/support/cli_runner.h"

namespace moxie::test {
namespace {

using CliFiles = CliTest;

// A .npy of version 1.0 with the given header and data.
std::string npy(const std::string& header, const std::string& data, char major = 1) {
  std::string text("\x93NUMPY", 6);
  text +=
      {major, '\0', static_cast<char>(header.size() & 0xff), static_cast<char>(header.size() >> 8)};
  if (major > 1) text += std::string(2, '\0');
  return text + header + data;
}
std::string ids_header(const std::string& shape, const std::string& descr = "<i4",
                       const char* fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }\n";
}
std::string int32s(const std::vector<std::int32_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * 4};
}
// 2 ranks of 3 tokens, top 2.
const std::string kRouted =
    "run " + kSmall + "--ranks 2 --tokens 3 --forward-only --routing ids.npy ";
const std::vector<std::int32_t> kIds = {0, 1, 2, 3, 4, 5, 5, 4, -1, 2, 0, 0};

TEST_F(CliFiles, Text) {
  expect_error("run --text nowhere.txt", 1, {"nowhere.txt", "does not exist"});
  write("empty.txt", "");
  expect_error("run --text empty.txt", 1, {"empty.txt is empty"});
  expect_error("run --text .", 1, {"is a folder"});
}

TEST_F(CliFiles, RoutingIsReadInEveryVersionAndType) {
  for (const char major : {1, 2, 3}) {
    write("ids.npy", npy(ids_header("(6, 2)"), int32s(kIds), major));
    const CliResult result = moxie(kRouted + "--json -");
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(nlohmann::json::parse(result.out)["rows"]["per_expert"],
              nlohmann::json({3, 1, 2, 1, 2, 2}));
  }
  std::string wide;
  for (const std::int64_t id : kIds) wide.append(reinterpret_cast<const char*>(&id), 8);
  write("ids.npy", npy("{\"descr\": \"<i8\", \"shape\": (6,2), \"fortran_order\": False}", wide));
  EXPECT_EQ(moxie(kRouted + "--ids i64").code, 0);
  write("ids_0.npy", npy(ids_header("(3, 2)"), int32s(kIds).substr(0, 24)));
  write("ids_1.npy", npy(ids_header("(3, 2)"), int32s(kIds).substr(24)));
  EXPECT_EQ(moxie("run " + kSmall + "--ranks 2 --tokens 3 --routing 'ids_{rank}.npy'").code, 0);
}

TEST_F(CliFiles, BrokenNpy) {
  const std::string good = npy(ids_header("(6, 2)"), int32s(kIds));
  const auto expect = [&](const std::string& content, const std::vector<std::string>& parts) {
    write("ids.npy", content);
    expect_error(kRouted, 1, parts);
  };
  expect_error(kRouted, 1, {"ids.npy does not exist"});
  expect("", {"ids.npy is empty"});
  expect("PK\x03\x04 something else", {"is not a .npy file"});
  for (const std::size_t size : {3, 7, 9, 30, 70})
    expect(good.substr(0, size), {"ids.npy is truncated"});
  expect(good.substr(0, good.size() - 1),
         {"truncated", "[6, 2]", "'<i4'", std::to_string(good.size())});
  expect(good + "x", {"1 bytes behind"});
  expect(npy(ids_header("(6, 2)"), int32s(kIds), 9), {"version 9.0"});
  expect(npy(ids_header("(6, 2)", "<i4", "True"), int32s(kIds)), {"Fortran order", "C order"});
  expect(npy(ids_header("(6, 2)", "<f4"), int32s(kIds)),
         {"dtype '<f4'", "'<i4' or '<i8' is needed"});
  expect(npy(ids_header("(6, 2)", ">i4"), int32s(kIds)), {"dtype '>i4'", "little-endian"});
  expect(npy(ids_header("(6, 2)", "|O"), int32s(kIds)), {"dtype '|O'"});
  expect(npy(ids_header("(12,)"), int32s(kIds)), {"shape [12]", "[6, 2] is needed"});
  expect(npy(ids_header("(4, 3)"), int32s(kIds)), {"shape [4, 3]", "[6, 2] is needed"});
  expect(npy(ids_header("(6, -2)"), int32s(kIds)), {"header is not valid"});
  expect(npy(ids_header("(9223372036854775807, 9)"), int32s(kIds)), {"too large"});
  expect(npy("{'descr': '<i4', 'shape': (6, 2)}", int32s(kIds)), {"'fortran_order' is missing"});
  expect(npy("{'descr': '<i4', 'surprise': 1}", int32s(kIds)), {"unknown key 'surprise'"});
  expect(npy("{'descr: 1", int32s(kIds)), {"header is not valid"});
  EXPECT_EQ(files(), std::set<std::string>{"ids.npy"});
}

TEST_F(CliFiles, IdsOutsideTheLayer) {
  std::vector<std::int32_t> ids = kIds;
  ids[7] = 6;
  write("ids.npy", npy(ids_header("(6, 2)"), int32s(ids)));
  expect_error(kRouted, 1, {"expert id 6", "rank 1 token 0 slot 1", "-1 .. 5"});
  ids[7] = -2;
  write("ids.npy", npy(ids_header("(6, 2)"), int32s(ids)));
  expect_error(kRouted, 1, {"expert id -2"});
}

TEST_F(CliFiles, PlacesThatCannotBeWritten) {
  expect_error("run --trace nowhere/t", 1, {"nowhere/t.svg", "folder nowhere does not exist"});
  expect_error("run --json nowhere/r.json", 1, {"nowhere/r.json", "does not exist"});
  expect_error("run --dump nowhere/d", 1, {"nowhere", "does not exist"});
  expect_error("run --dump .", 1, {"current folder"});
  std::filesystem::create_directory(path("full"));
  write("full/file", "x");
  expect_error("run --dump full", 1, {"full already exists"});
  EXPECT_EQ(files(), (std::set<std::string>{"full", "full/file"}));
}

TEST_F(CliFiles, AFailedRunLeavesNothing) {
  write("ids.npy", npy(ids_header("(6, 2)"), int32s({0, 1, 2, 3, 4, 5, 5, 4, 9, 2, 0, 0})));
  EXPECT_EQ(moxie(kRouted + "--dump d --trace t --json r.json").code, 1);
  EXPECT_EQ(files(), std::set<std::string>{"ids.npy"});
}

TEST_F(CliFiles, BrokenDumps) {
  expect_error("run --inputs nowhere", 1, {"nowhere does not exist"});
  const CliResult made = moxie("run " + kSmall + "--ranks 2 --tokens 4 --dump d");
  ASSERT_EQ(made.code, 0) << made.err;
  const std::string problem = read("d/problem.json");
  const auto expect = [&](const std::string& from, const std::string& to,
                          const std::vector<std::string>& parts) {
    std::string changed = problem;
    ASSERT_NE(changed.find(from), std::string::npos) << from;
    write("d/problem.json", changed.replace(changed.find(from), from.size(), to));
    expect_error("run --inputs d", 1, parts);
  };
  expect("{", "[", {"d/problem.json is not JSON"});
  expect("\"format\": 1", "\"format\": 7", {"'format' is 7", "reads 1"});
  expect("\"hidden\": 64", "\"hidden\": 65", {"problem.json", "hidden is 65", "64"});
  expect("\"hidden\": 64", "\"hidden\": 128",
         {"rank0/x.bf16.npy", "shape [4, 64]", "[4, 128] is needed"});
  expect("\"hidden\": 64", "\"hidden\": \"64\"", {"'hidden'", "not a whole number"});
  expect("\"hidden\"", "\"hide\"", {"'hidden' is missing"});
  expect("\"bf16\"", "\"fp8\"", {"'dtype'", "fp8"});
  write("d/problem.json", problem);
  std::filesystem::remove(path("d/rank1/dy.bf16.npy"));
  expect_error("run --inputs d", 1, {"rank1/dy.bf16.npy does not exist", "--forward-only"});
  EXPECT_EQ(moxie("run --inputs d --forward-only --repeat 1").code, 0);
  write("d/rank1/up.bf16.npy", read("d/rank1/up.bf16.npy").substr(0, 500));
  expect_error("run --inputs d --forward-only", 1, {"rank1/up.bf16.npy is truncated"});
}

TEST_F(CliFiles, TimelinesThatAreNone) {
  expect_error("trace nowhere.json", 1, {"nowhere.json does not exist"});
  write("a.json", "{\"traceEvents\": [");
  expect_error("trace a.json", 1, {"a.json is not JSON"});
  write("a.json", "{\"traceEvents\": []}");
  expect_error("trace a.json", 1, {"not a timeline of Moxie"});
  write("a.json", "{\"traceEvents\": [{\"ph\":\"X\"}], \"moxie\": {\"passes\": []}}");
  expect_error("trace a.json", 1, {"not a whole timeline"});
  EXPECT_EQ(files(), std::set<std::string>{"a.json"});
}

}  // namespace
}  // namespace moxie::test
