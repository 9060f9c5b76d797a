// Products of many rows on the processor's matrix tiles.
#pragma once

#include "quant/matrix.h"

namespace atom {

// Whether the processor has tiles of bytes and of bfloat16 and this process may use them.
bool has_tiles();

// Around products, on each thread.
void begin_tiles(const QuantRows& x);
void end_tiles();

// out [rows, 2 * kTileSide] = panels `panel` and the next of the weights times `rows` rows. x lies in
// whole tiles of rows, bfloat16 where inputs are no integers. A row has the bits that
// `multiply_panels` gives it.
void multiply_two_panels(const QuantMatrix& w, int64_t panel, const QuantRows& x, int64_t rows,
                         float* out);

}  // namespace atom
