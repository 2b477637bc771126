// What a Python World, Layer or Context holds. Each keeps the one it was made from alive, so that
// no order of deletion is wrong, and each can be closed: a closed one frees its memory at once and
// refuses everything else. Everything here runs under the GIL but the passes themselves.
#pragma once
#include <memory>
#include <optional>
#include <set>

#include "python/bindings/module.h"

namespace moxie::python {

struct LayerHandle;
struct ContextHandle;

struct WorldHandle {
  explicit WorldHandle(World&& w, bool cuda) : world(std::move(w)), on_cuda(cuda) {}
  World& open(const char* what);  // raises ClosedError
  void close();                   // raises while a pass runs
  void view_released();

  std::optional<World> world;
  bool on_cuda;
  RankRange local{world->local_ranks()};  // whose arrays a pass takes
  bool closed = false;
  int running = 0;              // passes of other Python threads
  int views = 0;                // arrays that input_buffer gave away and that are alive
  std::int64_t heap_bytes = 0;  // of the largest layer so far: a larger one moves the heaps
  std::set<LayerHandle*> layers;
};

struct LayerHandle {
  LayerHandle(std::shared_ptr<WorldHandle> world, const Problem& problem,
              const std::optional<Plan>& plan);
  ~LayerHandle();
  LayerHandle(const LayerHandle&) = delete;
  LayerHandle& operator=(const LayerHandle&) = delete;
  Layer& open(const char* what);
  void close();
  void release();  // the memory of the layer and of its contexts

  std::shared_ptr<WorldHandle> world;
  std::optional<Layer> layer;
  Problem problem;
  Plan plan;
  std::string plan_source;
  std::set<ContextHandle*> contexts;
};

struct ContextHandle {
  ContextHandle(std::shared_ptr<LayerHandle> layer, Context&& context);
  ~ContextHandle();
  ContextHandle(const ContextHandle&) = delete;
  ContextHandle& operator=(const ContextHandle&) = delete;
  Context& open(const char* what);

  std::shared_ptr<LayerHandle> layer;
  std::optional<Context> context;
};

// A pass runs: nothing may be closed until it has ended. Made and destroyed under the GIL.
class RunningPass {
 public:
  explicit RunningPass(WorldHandle& world) : world_(world) { ++world_.running; }
  ~RunningPass() { --world_.running; }
  RunningPass(const RunningPass&) = delete;
  RunningPass& operator=(const RunningPass&) = delete;

 private:
  WorldHandle& world_;
};

}  // namespace moxie::python
