// Files that the engine itself wrote: read with a sum over their bytes, which shows damage.
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "parallel.h"

namespace atom {
namespace {

// What a thread reads at once: it sums the bytes while they are in its cache.
constexpr int64_t kPiece = 1 << 20;
constexpr int64_t kLanes32 = 64;

struct CheckedArgs {
  char* at;       // memory of the bytes
  uint64_t* sum;  // that of the bytes is added
  int64_t file;   // a descriptor that they are read from, or -1: they are there
  int64_t offset, bytes, threads;
};

// Of a piece, by its number. Lanes are independent, so compilers multiply many at a time.
uint64_t sum_of(const char* at, int64_t bytes, int64_t number) {
  uint32_t lanes[kLanes32];
  for (int64_t j = 0; j < kLanes32; ++j) lanes[j] = uint32_t(j + 1) * 0x9E3779B1u;
  const auto add = [&](const char* block) {
    uint32_t words[kLanes32];
    std::memcpy(words, block, sizeof(words));
    for (int64_t j = 0; j < kLanes32; ++j) {
      const uint32_t mixed = lanes[j] + words[j] * 0x85EBCA77u;
      lanes[j] = (mixed << 13 | mixed >> 19) * 0x9E3779B1u;
    }
  };
  const int64_t block = sizeof(uint32_t) * kLanes32, whole = bytes / block * block;
  for (int64_t i = 0; i < whole; i += block) add(at + i);
  if (whole < bytes) {
    char rest[sizeof(uint32_t) * kLanes32] = {};
    std::memcpy(rest, at + whole, bytes - whole);
    add(rest);
  }
  uint64_t sum = uint64_t(number) * 0x9E3779B97F4A7C15u + uint64_t(bytes);
  for (int64_t j = 0; j < kLanes32; ++j) {
    sum = (sum ^ lanes[j]) * 0xD6E8FEB86659FD93u;
    sum ^= sum >> 32;
  }
  return sum;
}

// Reads all bytes -> 0, or the error; EIO where the file ends before.
int64_t read_all(const CheckedArgs& a, int64_t start, int64_t bytes) {
  while (bytes > 0) {
    const ssize_t got = pread(int(a.file), a.at + start, size_t(bytes), off_t(a.offset + start));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : EIO;
    start += got;
    bytes -= got;
  }
  return 0;
}

}  // namespace
}  // namespace atom

// Returns 0, or 1 + the error of reading.
ATOM_EXPORT int64_t atom_checked_bytes(const atom::CheckedArgs* args) {
  using namespace atom;
  const CheckedArgs& a = *args;
  std::atomic<uint64_t> sum{0};
  std::atomic<int64_t> error{0};
  run_tasks((a.bytes + kPiece - 1) / kPiece, a.threads, [&](TaskQueue::Hand& hand) {
    for (int64_t i; hand.take(i);) {
      const int64_t start = i * kPiece, bytes = std::min(kPiece, a.bytes - start);
      if (const int64_t failed = a.file < 0 ? 0 : read_all(a, start, bytes)) error = 1 + failed;
      sum += sum_of(a.at + start, bytes, i);
    }
  });
  *a.sum += sum;
  return error;
}
