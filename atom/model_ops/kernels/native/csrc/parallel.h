// Threads and scratch memory.
//
// Every thread that calls kernels has a team of helpers of its own. The caller publishes a phase
// (a set of tasks); helpers that are awake enter it and take tasks beside the caller. The caller waits
// only for helpers that have entered, never for one to come: a helper that sleeps, or whose
// processor another program took, costs nothing but its help.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>

#define ATOM_EXPORT extern "C" __attribute__((visibility("default")))

namespace atom {

// Threads that a call may take when its arguments say 0: those of the program that is running.
inline thread_local int64_t program_threads = 1;

// How many threads a call may take, from its arguments.
inline int64_t team_size(int64_t threads) { return threads == 0 ? program_threads : threads; }

// Deals the tasks of one phase. Every thread starts on a range of its own, neighbours in memory,
// and then helps with others' ranges: a thread that lost its processor to another program holds
// up one task and not its share of all.
class TaskQueue {
 public:
  TaskQueue(int64_t count, int64_t threads)
      : ranges_(std::clamp(threads, int64_t{1}, kMostRanges)) {
    for (int64_t i = 0; i < ranges_; ++i) {
      range_[i].next.store(count * i / ranges_, std::memory_order_relaxed);
      range_[i].end = count * (i + 1) / ranges_;
    }
  }

  // One thread's view. Made once by every worker.
  class Hand {
   public:
    explicit Hand(TaskQueue& queue)
        : queue_(queue), range_(queue.hands_.fetch_add(1, std::memory_order_relaxed)) {}

    bool take(int64_t& task) {
      for (; tried_ < queue_.ranges_; ++tried_, ++range_) {
        Range& range = queue_.range_[range_ % queue_.ranges_];
        task = range.next.fetch_add(1, std::memory_order_relaxed);
        if (task < range.end) return true;
      }
      return false;
    }

    // Whether a task is left behind the one that was taken last, neighbours in memory.
    bool has_next() const {
      const Range& range = queue_.range_[range_ % queue_.ranges_];
      return range.next.load(std::memory_order_relaxed) < range.end;
    }

   private:
    TaskQueue& queue_;
    int64_t range_, tried_ = 0;
  };

 private:
  static constexpr int64_t kMostRanges = 64;
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };

  const int64_t ranges_;
  std::atomic<int64_t> hands_{0};
  Range range_[kMostRanges];
};

inline int64_t nanoseconds() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One phase: `work(data)` takes tasks until there are none.
struct Phase {
  void (*work)(void* data);
  void* data;
};

// Runs a phase on the caller and on up to `threads` - 1 helpers; returns when all its tasks are done.
void run_phase(const Phase& phase, int64_t threads);

// Runs `worker(hand)` on several threads, each of which takes tasks from its hand until none is left.
// threads: 0 for those of the running program.
template <class Worker>
void run_tasks(int64_t tasks, int64_t threads, const Worker& worker) {
  threads = std::min(team_size(threads), tasks);
  struct Shared {
    const Worker& worker;
    TaskQueue queue;
  } shared{worker, {tasks, threads}};
  const auto work = [](void* data) {
    auto* s = static_cast<Shared*>(data);
    TaskQueue::Hand hand(s->queue);
    s->worker(hand);
  };
  if (threads <= 1) {
    work(&shared);
  } else {
    run_phase({work, &shared}, threads);
  }
}

// `body(begin, end)` over equal shares of [0, count).
template <class Body>
void run_shares(int64_t count, int64_t threads, const Body& body) {
  threads = team_size(threads);
  const int64_t shares = threads <= 1 ? 1 : (count < 4 * threads ? count : 4 * threads);
  run_tasks(shares, threads, [&](TaskQueue::Hand& hand) {
    for (int64_t i; hand.take(i);) body(count * i / shares, count * (i + 1) / shares);
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
