// Several arrays in one piece of scratch memory.
#pragma once

#include "parallel.h"

namespace atom {

class Arena {
 public:
  explicit Arena(char* memory) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    char* const at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(at);
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// What `lay_out(arena)` returns, called once to measure and once with memory.
template <class LayOut>
auto carve(Scratch& scratch, const LayOut& lay_out) {
  Arena measure(nullptr);
  lay_out(measure);
  Arena arena(scratch.get<char>(measure.used()));
  return lay_out(arena);
}

}  // namespace atom
