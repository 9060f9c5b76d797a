// The token with the largest score of each row.
#include "sampling/sampling.h"

namespace atom {
namespace {

struct ArgmaxArgs {
  const float* scores;  // [rows, vocab_size]
  int64_t* token_ids;   // [rows]
  int64_t rows, vocab_size, threads;
};

int64_t argmax(const ArgmaxArgs& a) {
  const int64_t parts = num_parts(a.vocab_size);
  static thread_local Scratch scratch;
  auto* extents = scratch.get<Extent>(a.rows * parts);
  const auto measure_part = [&](int64_t row, int64_t p) {
    const Span span = part_of(p, a.vocab_size);
    const float* scores = a.scores + row * a.vocab_size + span.begin;
    extents[row * parts + p] = measure(scores, span.end - span.begin);
  };
  const auto finish = [&](int64_t row) {
    const float* scores = a.scores + row * a.vocab_size;
    a.token_ids[row] = find_largest(scores, a.vocab_size, extents + row * parts).token;
  };
  run_rows(a.rows, a.vocab_size, a.threads, Pass{measure_part, finish});
  return 0;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_argmax(const atom::ArgmaxArgs* args) { return atom::argmax(*args); }
