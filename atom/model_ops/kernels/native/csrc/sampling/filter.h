// The tokens that top_k and top_p keep, without sorting the vocabulary: likely ones are dealt into
// buckets by score, and only those buckets are sorted in which a limit falls.
#pragma once

#include "sampling/race.h"

namespace atom {

constexpr int64_t kBlock = 128;    // tokens whose weights are added in float32
constexpr int64_t kBuckets = 1024;
// Exponents of the tokens that are looked at first, and of all that have a weight.
constexpr float kFirstReach = 10.0f, kReach = 104.0f;

struct Limits {
  int64_t top_k;
  float top_p;
};

// Lists the tokens of a part whose exponent is about -reach or more. Returns their number; adds the
// weights of the whole part to `total`, if there is one.
// Without a place for tokens it only adds.
inline int64_t collect(const Odds& odds, const Span& span, float reach, int32_t* tokens,
                       double* total) {
  const float least = odds.largest - reach * odds.temperature;
#if defined(__AVX512F__) && defined(__AVX512BW__)
  vint lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
#endif
  int64_t count = 0;
  for (int64_t block = span.begin; block < span.end; block += kBlock) {
    vfloat sums = {};
    const int64_t end = std::min(block + kBlock, span.end);
    for (int64_t i = block; i < end; i += kLanes) {
      const vfloat scores = load_scores(odds.scores + i, end - i);
      if (total != nullptr) {
        const vfloat weights = exp(odds.exponent(scores));
        sums += select(weights >= odds.min_p, weights, vfloat{});
      }
      if (tokens == nullptr) continue;
      const vint near = (scores >= least) & (scores > -kInfinity);
      if (!any(near)) continue;
#if defined(__AVX512F__) && defined(__AVX512BW__)
      const __mmask16 mask = _mm512_movepi32_mask((__m512i)near);
      _mm512_mask_compressstoreu_epi32(tokens + count, mask, (__m512i)(lanes + int32_t(i)));
      count += __builtin_popcount(mask);
#else
      for (int lane = 0; lane < kLanes; ++lane) {
        if (near[lane]) tokens[count++] = int32_t(i) + lane;
      }
#endif
    }
    if (total != nullptr) *total += double(sum(sums));
  }
  return count;
}

// Tokens in the order of their scores, the lowest id first among equals, as far as is needed.
class Candidates {
 public:
  struct Token {
    uint64_t order;  // ascends as scores descend, then as ids ascend
    float weight;

    int64_t id() const { return int64_t(order & 0xffffffffu); }
    bool operator<(const Token& other) const { return order < other.order; }
  };

  // Where a limit falls: tokens before `end` are kept.
  struct Cut {
    uint64_t end;
    double mass;  // of the kept tokens
    bool found;
  };

  Candidates(const Odds& odds, const int32_t* tokens, int64_t count, float width, Scratch& scratch);

  // The first token with `count` others before it, or at least `mass`.
  Cut cut(int64_t count, double mass);

  // The tokens before `end` take part.
  void run(uint64_t end, Race& race) const;

 private:
  Token* tokens_;
  int64_t starts_[kBuckets + 1] = {};
  double mass_[kBuckets] = {};
  bool is_sorted_[kBuckets] = {};
};

inline uint64_t order_of(float score, int32_t token) {
  score += 0.0f;  // -0 becomes 0
  uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  const uint32_t descending = bits >> 31 ? bits : ~bits & 0x7fffffffu;
  return uint64_t(descending) << 32 | uint32_t(token);
}

inline Candidates::Candidates(const Odds& odds, const int32_t* tokens, int64_t count, float width,
                              Scratch& scratch) {
  const int64_t room = (count + kLanes - 1) / kLanes * kLanes;
  char* memory = scratch.get<char>(room * (sizeof(Token) + sizeof(float) + sizeof(int16_t)));
  tokens_ = reinterpret_cast<Token*>(memory);
  auto* weights = reinterpret_cast<float*>(tokens_ + room);
  auto* buckets = reinterpret_cast<int16_t*>(weights + room);
  const float scale = std::min(float(kBuckets) / width, 1e30f);
  for (int64_t i = 0; i < count; ++i) {
    const float score = odds.scores[tokens[i]];
    weights[i] = score;
    buckets[i] = int16_t(std::min(float(kBuckets - 1), (odds.largest - score) * scale));
    ++starts_[buckets[i] + 1];
  }
  for (int64_t b = 0; b < kBuckets; ++b) starts_[b + 1] += starts_[b];
  for (int64_t i = count; i < room; ++i) weights[i] = -kInfinity;
  for (int64_t i = 0; i < room; i += kLanes) {
    const vfloat weight = exp(odds.exponent(load(weights + i)));
    store(weights + i, select(weight >= odds.min_p, weight, vfloat{}));
  }
  int64_t next[kBuckets];
  std::copy(starts_, starts_ + kBuckets, next);
  for (int64_t i = 0; i < count; ++i) {
    tokens_[next[buckets[i]]++] = {order_of(odds.scores[tokens[i]], tokens[i]), weights[i]};
    mass_[buckets[i]] += double(weights[i]);
  }
}

inline Candidates::Cut Candidates::cut(int64_t count, double mass) {
  int64_t rank = 0;
  double before = 0;
  for (int64_t b = 0; b < kBuckets; ++b) {
    const int64_t size = starts_[b + 1] - starts_[b];
    if (rank + size <= count && before + mass_[b] < mass) {
      rank += size;
      before += mass_[b];
      continue;
    }
    Token *first = tokens_ + starts_[b], *last = first + size;
    if (!is_sorted_[b]) std::sort(first, last);
    is_sorted_[b] = true;
    for (const Token* token = first; token != last; ++token, ++rank) {
      if (rank >= count || !(before < mass)) return {token->order, before, true};
      before += double(token->weight);
    }
  }
  return {~uint64_t{0}, before, rank >= count};
}

inline void Candidates::run(uint64_t end, Race& race) const {
  for (int64_t i = 0; i < starts_[kBuckets]; ++i) {
    if (tokens_[i].order < end) race.run_one(tokens_[i].id(), tokens_[i].weight);
  }
}

}  // namespace atom
