// Which tokens visit which experts.
#pragma once

#include <algorithm>

#include "arena.h"
#include "gates.h"

namespace atom {

// What the router chose.
struct Choices {
  const float* weights;  // [rows, top_k]
  const void* ids;       // [rows, top_k] int32 or int64; beyond the experts: adds nothing
  int64_t rows, top_k, experts, id_bytes;

  int64_t id(int64_t i) const {
    return id_bytes == 4 ? static_cast<const int32_t*>(ids)[i] : static_cast<const int64_t*>(ids)[i];
  }
  // 0, or 1 + the row that has a negative id.
  int64_t wrong() const {
    for (int64_t i = 0; i < rows * top_k; ++i) {
      if (id(i) < 0) return 1 + i / top_k;
    }
    return 0;
  }
};

struct Visit {
  int64_t row;
  float weight;
};

// The tokens of one expert.
struct Visited {
  int64_t expert;
  int64_t first, count;  // in the list of visits
  int64_t x, h;          // where its packed inputs and activations begin, in bytes
};

// The visits of some rows, by expert, then by row.
struct Visits {
  Visited* experts;
  Visit* list;
  int64_t num_experts, num_visits;
};

// place(expert): gives an expert its `x` and `h`.
template <class Place>
Visits group_visits(const Choices& c, int64_t begin, int64_t end, Scratch& scratch,
                    const Place& place) {
  struct Lists {
    Visits visits;
    int64_t *first, *next;  // [experts + 1]
  };
  const int64_t most = (end - begin) * c.top_k;
  Lists lists = carve(scratch, [&](Arena& arena) {
    Lists l{};
    l.visits.experts = arena.take<Visited>(std::min(most, c.experts));
    l.visits.list = arena.take<Visit>(most);
    l.first = arena.take<int64_t>(c.experts + 1);
    l.next = arena.take<int64_t>(c.experts + 1);
    return l;
  });
  Visits& visits = lists.visits;
  std::fill(lists.first, lists.first + c.experts + 1, 0);
  for (int64_t i = begin * c.top_k; i < end * c.top_k; ++i) {
    if (c.id(i) < c.experts) ++lists.first[c.id(i) + 1];
  }
  for (int64_t e = 0; e < c.experts; ++e) {
    const int64_t count = lists.first[e + 1];
    lists.first[e + 1] += lists.first[e];
    lists.next[e] = lists.first[e];
    if (count == 0) continue;
    Visited& expert = visits.experts[visits.num_experts++];
    expert = {e, lists.first[e], count, 0, 0};
    place(expert);
  }
  visits.num_visits = lists.first[c.experts];
  for (int64_t i = begin * c.top_k; i < end * c.top_k; ++i) {
    if (c.id(i) < c.experts) visits.list[lists.next[c.id(i)]++] = {i / c.top_k, c.weights[i]};
  }
  return visits;
}

}  // namespace atom
