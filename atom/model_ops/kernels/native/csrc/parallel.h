// Threads and scratch memory. Work runs on the threads of the OpenMP runtime that torch has
// loaded, through the entry that compilers call: a second pool of spinning threads would fight
// with torch's for the processors.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>

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

inline int64_t nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Whether threads are worth it. A team waits for its last thread, and where other programs
// keep the processors busy, that one may wait for milliseconds to run at all, hundreds of times
// a step. When waiting costs more than the other threads bring, the caller works alone for a
// while, then tries again.
class Company {
 public:
  bool alone(int64_t now) const { return now < alone_until_; }

  // busy: how long the caller worked in a team; waited: how long for the others, after.
  void record(int64_t now, int64_t busy, int64_t waited, int64_t threads) {
    busy_ += busy;
    waited_ += waited;
    if (waited_ > kPatience + (threads - 1) * busy_) {
      pause_ = std::clamp(2 * pause_, kShortestPause, kLongestPause);
      alone_until_ = now + pause_;
      busy_ = waited_ = 0;
    } else if (busy_ > kMemory) {
      pause_ = 0;
      busy_ /= 2;
      waited_ /= 2;
    }
  }

 private:
  static constexpr int64_t kMillisecond = 1'000'000;
  static constexpr int64_t kPatience = kMillisecond / 2;
  static constexpr int64_t kMemory = 20 * kMillisecond;
  static constexpr int64_t kShortestPause = 50 * kMillisecond;
  static constexpr int64_t kLongestPause = 1000 * kMillisecond;

  int64_t busy_ = 0, waited_ = 0, pause_ = 0, alone_until_ = 0;
};

inline Company& company() {
  static thread_local Company mine;
  return mine;
}

// Runs `worker(queue)` on every thread. The runtime ends and restarts threads when the size
// of a team changes, so it is either all of them or the caller alone.
template <class Worker>
void run_tasks(int64_t tasks, int64_t threads, const Worker& worker) {
  TaskQueue queue(tasks);
  const int64_t start = threads <= 1 || tasks <= 1 ? 0 : nanoseconds();
  if (start == 0 || company().alone(start)) {
    worker(queue);
    return;
  }
  struct Shared {
    const Worker& worker;
    TaskQueue& queue;
    std::thread::id caller;
    int64_t finished;
  } shared{worker, queue, std::this_thread::get_id(), start};
  team(
      [](void* data) {
        auto* s = static_cast<Shared*>(data);
        s->worker(s->queue);
        if (std::this_thread::get_id() == s->caller) s->finished = nanoseconds();
      },
      &shared, static_cast<unsigned>(threads), 0);
  const int64_t end = nanoseconds();
  company().record(end, shared.finished - start, end - shared.finished, threads);
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
