// Which tokens of a step go on from which recurrent state (StateMetadata in attention/metadata.py).
#pragma once

#include <cstdint>

namespace atom {

struct Sequences {
  const int64_t* rows;          // [count], of the pool
  const int32_t* context_lens;  // [count], up to the end of a sequence's tokens, padding included
  const int32_t* starts;        // [count + 1]: where the tokens of a sequence begin
  const int32_t* padding;       // [count]: tokens at the end that only pad; or null
  int64_t tokens, count, pool_rows;
};

// Tokens begin .. begin + count of one sequence are at position `start` and behind it; those that
// follow up to `end` are padding.
struct Span {
  int64_t row, start, begin, count, end;

  Span(const Sequences& all, int64_t s)
      : row(all.rows[s]),
        start(all.context_lens[s] - (all.starts[s + 1] - all.starts[s])),
        begin(all.starts[s]),
        count(all.starts[s + 1] - begin - (all.padding == nullptr ? 0 : all.padding[s])),
        end(all.starts[s + 1]) {}
};

// 0, or 1 + the sequence whose numbers cannot be.
inline int64_t wrong_sequence(const Sequences& all) {
  for (int64_t s = 0; s < all.count; ++s) {
    const Span span(all, s);
    const bool fits = span.row >= 0 && span.row < all.pool_rows && span.start >= 0 &&
                      span.begin >= 0 && span.count >= 0 && span.begin + span.count <= span.end &&
                      span.end <= all.tokens;
    if (!fits || (s == 0 && span.begin != 0)) return s + 1;
  }
  return 0;
}

}  // namespace atom
