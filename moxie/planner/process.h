// Process: a simulated worker's program, written as the thread of the CPU twin is: `co_await` where
// that one spins or computes. A thin coroutine; awaiting another Process runs it to its end first.
#pragma once
#include <coroutine>
#include <exception>
#include <utility>

#include "moxie/planner/pool.h"

namespace moxie::planner {

class Process {
 public:
  struct promise_type {
    std::coroutine_handle<> caller = nullptr;
    // Programs are members of a simulation, which has the pool of their frames.
    template <class Owner, class... Arguments>
    static void* operator new(std::size_t num_bytes, Owner& owner, Arguments&...) {
      return owner.frames().allocate(num_bytes);
    }
    static void operator delete(void* frame) { Pool::release(frame); }
    Process get_return_object() {
      return Process(std::coroutine_handle<promise_type>::from_promise(*this));
    }
    std::suspend_always initial_suspend() noexcept { return {}; }
    struct Final {
      bool await_ready() noexcept { return false; }
      std::coroutine_handle<> await_suspend(std::coroutine_handle<promise_type> self) noexcept {
        return self.promise().caller ? self.promise().caller : std::noop_coroutine();
      }
      void await_resume() noexcept {}
    };
    Final final_suspend() noexcept { return {}; }
    void return_void() {}
    void unhandled_exception() { std::terminate(); }  // programs throw nothing
  };

  Process() = default;
  explicit Process(std::coroutine_handle<promise_type> handle) : handle_(handle) {}
  Process(Process&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Process& operator=(Process&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Process() {
    if (handle_) handle_.destroy();
  }

  std::coroutine_handle<> handle() const { return handle_; }
  bool done() const { return !handle_ || handle_.done(); }

  bool await_ready() const noexcept { return false; }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> caller) noexcept {
    handle_.promise().caller = caller;
    return handle_;
  }
  void await_resume() const noexcept {}

 private:
  std::coroutine_handle<promise_type> handle_ = nullptr;
};

}  // namespace moxie::planner
