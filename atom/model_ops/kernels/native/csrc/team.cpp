// The helpers behind `run_phase`.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace atom {
namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How long a helper looks for the next phase before it sleeps: longer than Python takes between two
// operations, shorter than anybody would notice.
constexpr int64_t kAwake = 100'000;

// How long a helper works before it offers its processor to other programs. The scheduler would
// take it some milliseconds later, most likely within a task that the caller then waits for; after
// an offer it is back with all its time. Where nobody wants the processor an offer costs nothing.
constexpr int64_t kStint = 1'000'000;

// The processors that a helper may use; it leaves that of its caller. Beside a busy program
// schedulers may put a helper where its caller is: then each of them works half of the time.
class Place {
 public:
#if defined(__linux__)
  static int current() { return sched_getcpu(); }

  void leave(int caller) const {
    if (caller < 0 || current() != caller) return;
    cpu_set_t others = allowed_;
    CPU_CLR(caller, &others);
    if (CPU_COUNT(&others) > 0) sched_setaffinity(0, sizeof others, &others);
  }

 private:
  static cpu_set_t read() {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof set, &set);  // none are read where there are more than 1024
    return set;
  }

  const cpu_set_t allowed_ = read();
#else
  static int current() { return -1; }
  void leave(int) const {}
#endif
};

// How long the caller spins for a helper before it lets others have the processor.
constexpr int64_t kSpin = 20'000;

// Whether helpers are worth it. Where other programs keep the processors busy, a helper may lose its
// own in the middle of a task, and the caller waits for milliseconds, hundreds of times a step. When
// waiting costs more than the helpers bring, the caller works alone for a while, then tries again.
class Company {
 public:
  bool alone(int64_t now) const { return now < alone_until_; }

  // busy: how long the caller worked beside helpers; waited: how long for them afterwards.
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

// What a caller and its helpers share. It lives until the last of them has gone.
class Board {
 public:
  // Opens a phase for at most `helpers` helpers.
  void open(const Phase& phase, int64_t helpers) {
    phase_ = phase;
    most_ = helpers;
    caller_.store(Place::current(), std::memory_order_relaxed);
    const uint64_t number = (state_.load(std::memory_order_relaxed) >> kNumberShift) + 1;
    state_.store(number << kNumberShift | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
  }

  // Lets no more helpers in and waits for those who are.
  void close() {
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    const int64_t start = nanoseconds();
    for (int64_t i = 1; (state_.load(std::memory_order_acquire) & kInside) != 0; ++i) {
      relax();
      if (i % 64 == 0 && nanoseconds() - start > kSpin) std::this_thread::yield();
    }
  }

  void stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_.store(true, std::memory_order_seq_cst);
    wake_.notify_all();
  }

  // A helper's life.
  void help() {
    const Place place;
    uint64_t seen = 0;
    int64_t last = nanoseconds(), begun = last;
    while (wait_for_phase(seen)) {
      place.leave(caller_.load(std::memory_order_relaxed));
      if (!enter(seen)) continue;
      const int64_t entered = nanoseconds();
      phase_.work(phase_.data);
      state_.fetch_sub(1, std::memory_order_acq_rel);
      const int64_t now = nanoseconds();
      // After a gap that long it has just got a processor back.
      if (std::max(entered - last, now - entered) > 2 * kStint) begun = now;
      last = now;
      if (now - begun < kStint) continue;
      std::this_thread::yield();
      begun = last = nanoseconds();
    }
  }

 private:
  static constexpr uint64_t kInside = 0xffff;  // how many helpers are inside
  static constexpr uint64_t kOpen = 0x10000;
  static constexpr int kNumberShift = 17;

  static bool is_news(uint64_t state, uint64_t seen) {
    return (state & kOpen) != 0 && state >> kNumberShift != seen;
  }

  // False when there will be no more phases.
  bool wait_for_phase(uint64_t seen) {
    const int64_t start = nanoseconds();
    for (int64_t i = 1; !stopped_.load(std::memory_order_relaxed); ++i) {
      if (is_news(state_.load(std::memory_order_acquire), seen)) return true;
      relax();
      if (i % 64 == 0 && nanoseconds() - start > kAwake) {
        sleep(seen);
        return !stopped_.load(std::memory_order_relaxed);
      }
    }
    return false;
  }

  void sleep(uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] {
      return stopped_.load(std::memory_order_seq_cst) ||
             is_news(state_.load(std::memory_order_seq_cst), seen);
    });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  bool enter(uint64_t& seen) {
    uint64_t state = state_.load(std::memory_order_acquire);
    while (is_news(state, seen) && int64_t(state & kInside) < most_) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
        seen = state >> kNumberShift;
        return true;
      }
    }
    seen = state >> kNumberShift;
    return false;
  }

  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) Phase phase_{};
  std::atomic<int64_t> most_{0};
  std::atomic<int> caller_{-1};  // its processor
  std::atomic<int64_t> sleepers_{0};
  std::atomic<bool> stopped_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// One caller's helpers. They are not waited for when the caller ends, since a forked process has
// none of its parent's threads.
class Team {
 public:
  ~Team() { board_->stop(); }

  void run(const Phase& phase, int64_t threads) {
    const int64_t start = nanoseconds();
    if (company_.alone(start)) return phase.work(phase.data);
    for (; helpers_ < threads - 1; ++helpers_) {
      std::thread([board = board_] { board->help(); }).detach();
    }
    board_->open(phase, threads - 1);
    phase.work(phase.data);
    const int64_t done = nanoseconds();
    board_->close();
    const int64_t end = nanoseconds();
    company_.record(end, done - start, end - done, threads);
  }

 private:
  const std::shared_ptr<Board> board_ = std::make_shared<Board>();
  int64_t helpers_ = 0;
  Company company_;
};

}  // namespace

void run_phase(const Phase& phase, int64_t threads) {
  static thread_local Team team;
  team.run(phase, threads);
}

}  // namespace atom
