// The ranks' heaps, shared by all layers of a world, and what ranks as processes agree on.
#include "moxie/backend_cpu/cpu_backend.h"

#include <fmt/format.h>

#include <cstring>
#include <thread>

namespace moxie::backend_cpu {

CpuBackend::CpuBackend(const WorldOptions& options)
    : options_(options), gemm_(options.gemm), heaps_(options.num_ranks) {}
CpuBackend::CpuBackend(const WorldOptions& options, const ProcessOptions& process)
    : CpuBackend(options) {
  rendezvous_ = std::make_unique<transport::Rendezvous>(process.name, process.rank,
                                                        options.num_ranks, options.timeout_s);
  local_ = {process.rank, 1};
}

std::unique_ptr<BackendLayer> CpuBackend::make_layer(const Problem& problem, const Plan& plan) {
  return std::make_unique<CpuLayer>(*this, problem, plan);
}

void CpuBackend::reset() {
  // Peers write into this heap until they come here, and again as soon as they leave.
  meet("World::reset()");
  clear_signals();
  meet("World::reset()");
}

MachineId CpuBackend::machine() const {
  return {.backend = "cpu",
          .device = cpu_model(),
          .num_sms = std::thread::hardware_concurrency(),
          .ranks_of_devices = {options_.num_ranks},
          .runtime = gemm_.description()};
}

void CpuBackend::reserve(const pipeline::HeapLayout& heap) {
  signals_bytes_ = heap.signals_bytes;  // depends on the number of ranks only
  if (!of_processes()) {
    if (heaps_.reserve(heap.num_bytes)) clear_signals();
  } else if (heap.num_bytes > shared_heap_bytes_) {
    shared_heaps_ = share(heap.num_bytes, heap_bases_);  // zeroes
    shared_heap_bytes_ = heap.num_bytes;
    begin_generation();
  }
}

std::vector<transport::SharedBytes> CpuBackend::share(std::int64_t num_bytes,
                                                      std::vector<std::byte*>& bases) {
  auto own = transport::SharedBytes::create(num_bytes);
  const auto all =
      rendezvous_->all_gather("Layer()", "memory", {own.descriptor()}, options_.timeout_s);
  own.close_descriptor();
  std::vector<transport::SharedBytes> memory;
  bases.clear();
  for (std::size_t r = 0; r < all.size(); ++r) {
    auto mapped = transport::SharedBytes::map(all[r].descriptors.at(0), num_bytes);
    const bool mine = static_cast<std::int64_t>(r) == local_.begin;
    memory.push_back(mine ? std::move(own) : std::move(mapped));
    bases.push_back(memory.back().get());
  }
  return memory;
}

void CpuBackend::refuse_layer(const std::string& sentence) {
  if (!of_processes()) return;
  try {
    rendezvous_->all_gather("Layer()", "refused: " + sentence, {}, options_.timeout_s);
  } catch (const Error&) {  // the caller throws what is wrong here
  }
}

void CpuBackend::clear_signals() {
  const bool has_heaps = of_processes() ? shared_heap_bytes_ > 0 : heaps_.num_bytes() > 0;
  for (std::int64_t i = 0; has_heaps && i < local_.count; ++i) {
    std::memset(peers().at<std::byte>(RankId{local_.begin + i}, 0), 0,
                static_cast<std::size_t>(signals_bytes_));
  }
  begin_generation();
  stopped_ = false;
}

void CpuBackend::check_same_layer(const Problem& problem, const Plan& plan) {
  const auto all =
      rendezvous_->all_gather("Layer()", layer_words(problem, plan), {}, options_.timeout_s);
  std::vector<std::string> words;
  for (const transport::Contribution& one : all) words.push_back(one.text);
  moxie::check_same_layer(words, plan);
}

}  // namespace moxie::backend_cpu

namespace moxie {

std::unique_ptr<Backend> make_cpu_backend(const WorldOptions& options) {
  return std::make_unique<backend_cpu::CpuBackend>(options);
}
std::unique_ptr<Backend> make_cpu_process_backend(const WorldOptions& options,
                                                  const ProcessOptions& process) {
  return std::make_unique<backend_cpu::CpuBackend>(options, process);
}

}  // namespace moxie
