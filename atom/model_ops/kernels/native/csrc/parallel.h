// Threads and scratch memory. Work runs on the threads of the OpenMP runtime that torch has
// loaded, through the entry that compilers call: a second pool of spinning threads would fight
// with torch's for the processors.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#define ATOM_EXPORT extern "C" __attribute__((visibility("default")))

namespace atom {

// `GOMP_parallel`: calls function(data) on that many threads and waits for all.
using Team = void (*)(void (*function)(void*), void* data, unsigned threads, unsigned flags);

// Set once, before any kernel runs.
inline Team team = nullptr;

// Numbers the tasks of one call; whoever is free takes the next, so that a thread which
// lost its processor to another program holds up one task and not its share of all.
class TaskQueue {
 public:
  explicit TaskQueue(int64_t count) : count_(count) {}

  bool take(int64_t& task) {
    task = next_.fetch_add(1, std::memory_order_relaxed);
    return task < count_;
  }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t count_;
};

// Runs `worker(queue)` on every thread. The runtime ends and restarts threads when the size
// of a team changes, so it is either all of them or the caller alone.
template <class Worker>
void run_tasks(int64_t tasks, int64_t threads, const Worker& worker) {
  TaskQueue queue(tasks);
  if (threads <= 1 || tasks <= 1) {
    worker(queue);
    return;
  }
  struct Shared {
    const Worker& worker;
    TaskQueue& queue;
  } shared{worker, queue};
  team(
      [](void* data) {
        auto* s = static_cast<Shared*>(data);
        s->worker(s->queue);
      },
      &shared, static_cast<unsigned>(threads), 0);
}

// `body(begin, end)` over equal shares of [0, count).
template <class Body>
void run_shares(int64_t count, int64_t threads, const Body& body) {
  const int64_t shares = threads <= 1 ? 1 : (count < 4 * threads ? count : 4 * threads);
  run_tasks(shares, threads, [&](TaskQueue& queue) {
    for (int64_t i; queue.take(i);) body(count * i / shares, count * (i + 1) / shares);
  });
}

// Memory that one thread keeps between calls; it grows and never shrinks.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  template <class T>
  T* get(int64_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      data_ = std::aligned_alloc(64, bytes);
      size_ = data_ == nullptr ? 0 : bytes;
      if (data_ == nullptr) std::abort();
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace atom
