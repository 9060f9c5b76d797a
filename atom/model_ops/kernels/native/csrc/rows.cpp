// Small steps around the model, a few numbers for each row: gathers, verification, positions.
#include <algorithm>

#include "parallel.h"

namespace atom {
namespace {

struct VerifyArgs {
  const int64_t* sampled;  // [rows]
  const int64_t* drafts;   // [count, most] or null
  const int64_t* table;    // [count, most + 1] rows of `sampled`, or null: they follow each other
  int64_t* token_ids;      // [count, most + 1], written where there is a table
  int64_t* accepted;       // [count]
  int64_t count, most, rows;
};

// 0, or 1 + the sequence with a row that does not exist.
int64_t verify_drafts(const VerifyArgs& a) {
  const int64_t width = a.most + 1;
  for (int64_t s = 0; s < a.count; ++s) {
    const int64_t* own = a.sampled + s * width;
    if (a.table != nullptr) {
      for (int64_t i = s * width; i < (s + 1) * width; ++i) {
        if (a.table[i] < 0 || a.table[i] >= a.rows) return s + 1;
        a.token_ids[i] = a.sampled[a.table[i]];
      }
      own = a.token_ids + s * width;
    }
    const int64_t* drafts = a.drafts + s * a.most;
    int64_t accepted = 0;
    while (accepted < a.most && own[accepted] == drafts[accepted]) ++accepted;
    a.accepted[s] = accepted;
  }
  return 0;
}

struct PlaceArgs {
  int64_t* next_token_ids;        // [tokens]
  const int64_t* logits_indices;  // [rows] of the forward pass
  const int64_t* sampled;         // [rows]
  const int64_t* accepted;        // [count]
  const int64_t* table;           // [count, width] rows of logits, or null
  int64_t* last_rows;             // [count]
  int64_t tokens, rows, count, width;
};

// 0, or 1 + the row or sequence that does not exist.
int64_t place_samples(const PlaceArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    if (a.logits_indices[r] < 0 || a.logits_indices[r] >= a.tokens) return r + 1;
    a.next_token_ids[a.logits_indices[r]] = std::max(a.sampled[r], int64_t{0});
  }
  for (int64_t s = 0; s < a.count; ++s) {
    if (a.accepted[s] < 0 || a.accepted[s] >= a.width) return s + 1;
    int64_t row = s * a.width + a.accepted[s];
    if (a.table != nullptr) row = a.table[row];
    if (row < 0 || row >= a.rows) return s + 1;
    a.last_rows[s] = a.logits_indices[row];
  }
  return 0;
}

struct WindowArgs {
  const int32_t* of_block;      // [blocks]
  const int32_t* block_tables;  // [entries]
  const int64_t* slots;         // [count], -1 for none
  int32_t* tables;              // [entries]
  int64_t* own_slots;           // [count]
  int64_t blocks, entries, count, block_size;
};

// 0, or 1 + the entry or slot whose block is not in the map.
int64_t window_places(const WindowArgs& a) {
  for (int64_t i = 0; i < a.entries; ++i) {
    const int32_t block = a.block_tables[i];
    if (block < 0 || block >= a.blocks) return i + 1;
    a.tables[i] = a.of_block[block];
  }
  for (int64_t t = 0; t < a.count; ++t) {
    const int64_t slot = a.slots[t], block = slot / a.block_size;
    if (slot < 0) {
      a.own_slots[t] = slot;
      continue;
    }
    if (block >= a.blocks) return a.entries + t + 1;
    a.own_slots[t] = a.of_block[block] * a.block_size + slot % a.block_size;
  }
  return 0;
}

struct MRopeArgs {
  const float* cos_sin;      // [table_rows, width]
  const int64_t* positions;  // [count]
  const int64_t* shifts;     // [count, 3]
  const int64_t* axes;       // [width], 0, 1 or 2
  float* table;              // [count, width]
  int64_t* rows;             // [count]
  int64_t count, width, table_rows;
};

// 0, or 1 + the token whose place lies outside the table.
int64_t mrope_table(const MRopeArgs& a) {
  for (int64_t t = 0; t < a.count; ++t) {
    const float* places[3];
    for (int64_t axis = 0; axis < 3; ++axis) {
      const int64_t place = a.positions[t] + a.shifts[3 * t + axis];
      if (place < 0 || place >= a.table_rows) return t + 1;
      places[axis] = a.cos_sin + place * a.width;
    }
    for (int64_t i = 0; i < a.width; ++i) a.table[t * a.width + i] = places[a.axes[i]][i];
    a.rows[t] = t;
  }
  return 0;
}

struct PlaceDraftsArgs {
  const int64_t* first_ids;     // [count]
  const int64_t* positions;     // [count]
  const int32_t* block_tables;  // [count, width], rows `stride` entries apart
  const int32_t* block_counts;  // [count]
  int64_t* token_ids;           // [count, num_rows]
  int64_t* inside;              // [count, num_rows]
  int64_t* slots;               // [count, num_rows]
  int32_t* context_lens;        // [count]
  int32_t* starts;              // [count + 1]
  int64_t count, stride, width, distance, num_rows, mask_token_id, block_size, max_model_len;
};

// 0, or 1 + the sequence with more blocks than its table.
int64_t place_drafts(const PlaceDraftsArgs& a) {
  const int64_t rows = a.num_rows;
  a.starts[0] = 0;
  for (int64_t s = 0; s < a.count; ++s) {
    if (a.block_counts[s] > a.width) return s + 1;
    const int64_t limit = std::min(a.block_counts[s] * a.block_size, a.max_model_len);
    const int64_t first = a.positions[s] + a.distance;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = s * rows + i, wanted = first + i;
      const int64_t inside = std::max(std::min(wanted, limit - 1), int64_t{0});
      a.token_ids[at] = i == 0 ? a.first_ids[s] : a.mask_token_id;
      a.inside[at] = inside;
      a.slots[at] = -1;
      if (wanted >= 0 && wanted < limit) {
        const int64_t block = a.block_tables[s * a.stride + inside / a.block_size];
        a.slots[at] = block * a.block_size + inside % a.block_size;
      }
    }
    const int64_t nothing = std::min(rows, std::min(a.width * a.block_size, a.max_model_len));
    a.context_lens[s] = int32_t(limit == 0 ? nothing : std::min(first + rows, limit));
    a.starts[s + 1] = int32_t((s + 1) * rows);
  }
  return 0;
}

struct OptionsArgs {
  const uint32_t* options;  // [kinds, capacity]
  const int64_t* seeds;     // [capacity]
  const int64_t* rows;      // [count]
  uint32_t* own_options;    // [kinds, count]
  int64_t* own_seeds;       // [count]
  int64_t kinds, capacity, count;
};

// 0, or 1 + the entry whose row does not exist.
int64_t sampling_options(const OptionsArgs& a) {
  for (int64_t i = 0; i < a.count; ++i) {
    const int64_t row = a.rows[i];
    if (row < 0 || row >= a.capacity) return i + 1;
    a.own_seeds[i] = a.seeds[row];
    for (int64_t k = 0; k < a.kinds; ++k) {
      a.own_options[k * a.count + i] = a.options[k * a.capacity + row];
    }
  }
  return 0;
}

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_mrope_table(const atom::MRopeArgs* args) {
  return atom::mrope_table(*args);
}
ATOM_EXPORT int64_t atom_window_places(const atom::WindowArgs* args) {
  return atom::window_places(*args);
}
ATOM_EXPORT int64_t atom_verify_drafts(const atom::VerifyArgs* args) {
  return atom::verify_drafts(*args);
}
ATOM_EXPORT int64_t atom_place_samples(const atom::PlaceArgs* args) {
  return atom::place_samples(*args);
}
ATOM_EXPORT int64_t atom_place_drafts(const atom::PlaceDraftsArgs* args) {
  return atom::place_drafts(*args);
}
ATOM_EXPORT int64_t atom_sampling_options(const atom::OptionsArgs* args) {
  return atom::sampling_options(*args);
}
