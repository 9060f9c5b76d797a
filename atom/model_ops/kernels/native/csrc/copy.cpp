// Data movement between operations: copies of any layout and type, and rows by their index.
#include "parallel.h"
#include "simd.h"

namespace atom {
namespace {

// Bytes that one thread moves before others have woken up.
constexpr int64_t kSerialBytes = 1 << 16;

struct CopyArgs {
  const void* from;
  void* to;
  int64_t from_type, to_type;  // indices of `with_type`
  int64_t size[4];
  int64_t from_stride[4], to_stride[4];  // in elements
  int64_t threads;
};

// Calls `body` with a null pointer to the type of that index.
template <class Body>
void with_type(int64_t type, const Body& body) {
  switch (type) {
    case 0: body(static_cast<const float*>(nullptr)); break;
    case 1: body(static_cast<const bfloat16*>(nullptr)); break;
    case 2: body(static_cast<const int64_t*>(nullptr)); break;
    case 3: body(static_cast<const int32_t*>(nullptr)); break;
#if defined(__F16C__) || defined(__aarch64__)
    case 4: body(static_cast<const float16*>(nullptr)); break;
#endif
  }
}

template <class To, class From>
ATOM_INLINE void convert(const From* from, To* to) {
  if constexpr (std::is_same_v<To, From>) {
    *to = *from;
  } else if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    *to = To(*from);
  } else if constexpr (std::is_integral_v<To>) {
    *to = To(load_one(from));
  } else if constexpr (std::is_integral_v<From>) {
    store_one(to, float(*from));
  } else {
    store_one(to, load_one(from));
  }
}

template <class To, class From>
void copy_rows(const CopyArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t k = row % a.size[2], j = row / a.size[2] % a.size[1];
    const int64_t i = row / a.size[2] / a.size[1];
    const From* from = static_cast<const From*>(a.from) + i * a.from_stride[0] +
                       j * a.from_stride[1] + k * a.from_stride[2];
    To* to = static_cast<To*>(a.to) + i * a.to_stride[0] + j * a.to_stride[1] +
             k * a.to_stride[2];
    if (std::is_same_v<To, From> && a.from_stride[3] == 1 && a.to_stride[3] == 1) {
      std::memcpy(to, from, a.size[3] * sizeof(To));
      continue;
    }
    for (int64_t n = 0; n < a.size[3]; ++n) {
      convert(from + n * a.from_stride[3], to + n * a.to_stride[3]);
    }
  }
}

int64_t copy(const CopyArgs& a) {
  const int64_t rows = a.size[0] * a.size[1] * a.size[2];
  const int64_t threads = rows * a.size[3] * 8 < kSerialBytes ? 1 : a.threads;
  with_type(a.from_type, [&](auto* from) {
    with_type(a.to_type, [&](auto* to) {
      using From = std::remove_cv_t<std::remove_pointer_t<decltype(from)>>;
      using To = std::remove_cv_t<std::remove_pointer_t<decltype(to)>>;
      run_shares(rows, threads,
                 [&](int64_t begin, int64_t end) { copy_rows<To, From>(a, begin, end); });
    });
  });
  return 0;
}

struct GatherArgs {
  const int64_t* index;  // [rows]
  const char* from;      // [num_rows, row_bytes], rows from_stride bytes apart
  char* to;              // [rows, row_bytes]
  int64_t rows, num_rows, row_bytes, from_stride, threads;
};

// 0, or 1 + the entry that is no row.
int64_t gather_rows(const GatherArgs& a) {
  for (int64_t i = 0; i < a.rows; ++i) {
    if (a.index[i] < 0 || a.index[i] >= a.num_rows) return i + 1;
  }
  const int64_t threads = a.rows * a.row_bytes < kSerialBytes ? 1 : a.threads;
  run_shares(a.rows, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(a.to + i * a.row_bytes, a.from + a.index[i] * a.from_stride, a.row_bytes);
    }
  });
  return 0;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_copy(const atom::CopyArgs* args) { return atom::copy(*args); }

ATOM_EXPORT int64_t atom_gather_rows(const atom::GatherArgs* args) {
  return atom::gather_rows(*args);
}
