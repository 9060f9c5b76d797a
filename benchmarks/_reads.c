// Compiled by _reads.py.
#include <stddef.h>
#include <stdint.h>

// The sum of `count` numbers, a multiple of 32, which are read in four places at once: a core has
// more reads on their way than it begins for a single stream.
uint64_t read_all(const uint64_t* data, size_t count) {
  const size_t quarter = count / 4;
  uint64_t sums[8] = {0};
  for (size_t i = 0; i < quarter; i += 8)
    for (size_t stream = 0; stream < 4; ++stream)
      for (size_t k = 0; k < 8; ++k) sums[k] += data[stream * quarter + i + k];
  uint64_t sum = 0;
  for (size_t k = 0; k < 8; ++k) sum += sums[k];
  return sum;
}
