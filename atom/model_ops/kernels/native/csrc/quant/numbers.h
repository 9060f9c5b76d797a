// Products of bfloat16 rows with quantised weights that become bfloat16.
#pragma once

#include "linear/linear_args.h"
#include "quant/matrix.h"

namespace atom {

// What `linear` makes of the same weights as a matrix of bfloat16, with the same bits. Where the
// processor has tiles of bfloat16 only.
// order: as in QuantInputs. as_float32: whether sums leave as they are.
void multiply_bfloat16(LinearArgs args, const QuantMatrix& w, const int32_t* order, bool as_float32);

}  // namespace atom
