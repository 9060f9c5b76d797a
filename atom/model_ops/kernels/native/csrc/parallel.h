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

// Deals the tasks of one call. Every thread starts on a range of its own, neighbours in memory,
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

// Whether threads are worth it. A team starts and ends with its last thread, and where other programs
// keep the processors busy, that one may wait for milliseconds to run at all, hundreds of times
// a step. When waiting costs more than the other threads bring, the caller works alone for a
// while, then tries again.
class Company {
 public:
  bool alone(int64_t now) const { return now < alone_until_; }

  // busy: how long the caller worked in a team; waited: how long for the others, before and
  // after.
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

// Runs `worker(hand)` on every thread. The runtime ends and restarts threads when the size
// of a team changes, so it is either all of them or the caller alone.
template <class Worker>
void run_tasks(int64_t tasks, int64_t threads, const Worker& worker) {
  const int64_t start = threads <= 1 || tasks <= 1 ? 0 : nanoseconds();
  if (start == 0 || company().alone(start)) {
    TaskQueue queue(tasks, 1);
    TaskQueue::Hand hand(queue);
    worker(hand);
    return;
  }
  TaskQueue queue(tasks, threads);
  struct Shared {
    const Worker& worker;
    TaskQueue& queue;
    std::thread::id caller;
    int64_t entered, finished;
  } shared{worker, queue, std::this_thread::get_id(), start, start};
  team(
      [](void* data) {
        auto* s = static_cast<Shared*>(data);
        const bool caller = std::this_thread::get_id() == s->caller;
        if (caller) s->entered = nanoseconds();
        TaskQueue::Hand hand(s->queue);
        s->worker(hand);
        if (caller) s->finished = nanoseconds();
      },
      &shared, static_cast<unsigned>(threads), 0);
  const int64_t end = nanoseconds(), busy = shared.finished - shared.entered;
  company().record(end, busy, end - start - busy, threads);
}

// `body(begin, end)` over equal shares of [0, count).
template <class Body>
void run_shares(int64_t count, int64_t threads, const Body& body) {
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
