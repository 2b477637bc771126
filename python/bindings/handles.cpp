#include "python/bindings/handles.h"

#include "moxie/pipeline/layout.h"
#include "python/bindings/arrays.h"

namespace moxie::python {
namespace {

void refuse_while_running(const WorldHandle& world, const char* what) {
  if (world.running == 0) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} was closed while {} of its passes run in another thread, must wait "
                          "until they have ended",
                          what, world.running));
}

}  // namespace

World& WorldHandle::open(const char* what) {
  if (closed) raise("ClosedError", fmt::format("{} was called on a World that is closed", what));
  return *world;
}

void WorldHandle::close() {
  if (closed) return;
  refuse_while_running(*this, "World");
  closed = true;
  for (LayerHandle* layer : layers) layer->release();
  if (views == 0) world.reset();  // else the last array that points into a heap frees it
}

void WorldHandle::view_released() {
  if (--views == 0 && closed) world.reset();
}

LayerHandle::LayerHandle(std::shared_ptr<WorldHandle> world_in, const Problem& problem_in,
                         const std::optional<Plan>& plan_in)
    : world(std::move(world_in)) {
  World& w = world->open("Layer()");
  const auto heap_bytes = [](const Problem& p) {
    check(p);
    return pipeline::heap_layout(p).num_bytes;
  };
  if (world->views > 0 && heap_bytes(problem_in) > world->heap_bytes) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("the layer needs a heap of {} bytes, must be at most the {} of its "
                            "World's layers while {} arrays of input_buffer are alive: a larger "
                            "one would move them; delete them first",
                            heap_bytes(problem_in), world->heap_bytes, world->views));
  }
  {
    const RunningPass running(*world);
    const nb::gil_scoped_release release;  // ranks as processes wait for each other here
    if (plan_in)
      layer.emplace(w, problem_in, *plan_in);
    else
      layer.emplace(w, problem_in);
  }
  problem = layer->problem();
  plan = layer->plan();
  plan_source = layer->plan_source().words;
  world->heap_bytes = std::max(world->heap_bytes, heap_bytes(problem));
  world->layers.insert(this);
}

LayerHandle::~LayerHandle() { world->layers.erase(this); }

Layer& LayerHandle::open(const char* what) {
  if (!layer) {
    raise("ClosedError", fmt::format("Layer.{} was called on a {} that is closed", what,
                                     world->closed ? "World" : "Layer"));
  }
  return *layer;
}

void LayerHandle::close() {
  if (!layer) return;
  refuse_while_running(*world, "Layer");
  release();
}

void LayerHandle::release() {
  for (ContextHandle* c : contexts) c->context.reset();
  layer.reset();
}

ContextHandle::ContextHandle(std::shared_ptr<LayerHandle> layer_in, Context&& context_in)
    : layer(std::move(layer_in)), context(std::move(context_in)) {
  layer->contexts.insert(this);
}
ContextHandle::~ContextHandle() { layer->contexts.erase(this); }

Context& ContextHandle::open(const char* what) {
  if (!context) {
    raise("ClosedError",
          fmt::format("{} was called with a Context whose Layer or World is closed", what));
  }
  return *context;
}

}  // namespace moxie::python
