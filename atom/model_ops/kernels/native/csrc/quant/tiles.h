// Products of many rows on the processor's matrix tiles.
#pragma once

#include "quant/matrix.h"

namespace atom {

// Whether the processor has tiles of bytes and of bfloat16 and this process may use them.
bool has_tiles();

// Around products, on each thread.
void begin_tiles(const QuantRows& x);
void end_tiles();

struct SpanRange {
  int64_t begin, end;
};

// Whether a span of wide inputs is one step of tiles, and not the only one.
inline bool has_short_spans(const QuantMatrix& w, const QuantRows& x) {
  return is_wide(x.kind) && x.span <= line_inputs(x.kind) && x.span < w.inputs;
}

// Whether products of so many rows may be computed span by span.
inline bool takes_ranges(const QuantMatrix& w, const QuantRows& x, int64_t rows) {
  return has_short_spans(w, x) && (rows > kTileSide || is_split(x.kind, x.tile_rows));
}

// out [rows, 2 * kTileSide] = panels `panel` and the next of the weights times `rows` rows, whole tiles
// of them, as x lies; bfloat16 where inputs are no integers. `spans` are all, or, where `takes_ranges`,
// at least two: out is set from span 0 on, else added to, and is done with the last span. A row has
// the bits that `multiply_panels` gives it.
void multiply_two_panels(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows,
                         SpanRange spans, float* out);

}  // namespace atom
