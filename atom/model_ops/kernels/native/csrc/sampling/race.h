// The exponential race: the kept token with the largest weight / E wins, where E is exponential
// noise that the seed, the position and the token decide (model_ops/noise.py has its definition).
#pragma once

#include "sampling/sampling.h"

namespace atom {

template <class U>  // uint32_t or a vector of them
ATOM_INLINE U mix(U h, U key) {
  h ^= h >> 16;
  h = h * 0x21f0aaadu + key;
  h ^= h >> 15;
  h *= 0xd35a2d97u;
  return h ^ (h >> 15);
}

struct Keys {
  uint32_t first, second;

  Keys() = default;
  Keys(int64_t seed, int64_t position) {
    const uint32_t words[4] = {uint32_t(seed), uint32_t(uint64_t(seed) >> 32),
                               uint32_t(position), uint32_t(uint64_t(position) >> 32)};
    static constexpr uint32_t constants[2][4] = {
        {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u},
        {0xa4093822u, 0x299f31d0u, 0x082efa98u, 0xec4e6c89u}};
    uint32_t sums[2] = {0, 0};
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 4; ++j) sums[i] += mix(words[j] ^ constants[i][j], 0u);
    }
    first = mix(sums[0], 0u);
    second = mix(sums[1], 0u);
  }

  // 31 random bits of tokens.
  ATOM_INLINE uint32_t bits(uint32_t token) const {
    return mix(mix(token * 0x9e3779b1u, 0u) ^ first, second) & 0x7fffffffu;
  }
  ATOM_INLINE vint bits(vuint tokens) const {
    const vuint hashes = mix(tokens * 0x9e3779b1u, vuint{});
    return (vint)(mix(hashes ^ first, vuint{} + second) & 0x7fffffffu);
  }
};

// v of the definition: E = -log(1 - v), which is no less than v.
ATOM_INLINE float uniform(uint32_t bits) {
  return std::min(float(int32_t(bits)) * 0x1p-31f + 0x1p-32f, 1.0f - 0x1p-24f);
}
ATOM_INLINE vfloat uniform(vint bits) {
  const vfloat v = __builtin_convertvector(bits, vfloat) * 0x1p-31f + 0x1p-32f;
  return min(v, splat(1.0f - 0x1p-24f));
}

// Scores, or what is left of them; absent lanes hold -infinity.
ATOM_INLINE vfloat load_scores(const float* scores, int64_t count) {
  if (count >= kLanes) return load(scores);
  float padded[kLanes];
  for (int i = 0; i < kLanes; ++i) padded[i] = i < count ? scores[i] : -kInfinity;
  return load(padded);
}

// The options of a random row, and its most likely token's score.
struct Odds {
  const float* scores;
  const int32_t* ids;  // the noise of score i is that of token ids[i]; null: of token i
  float largest, temperature, min_p;
  Keys keys;

  ATOM_INLINE float exponent(float score) const { return (score - largest) / temperature; }
  ATOM_INLINE vfloat exponent(vfloat scores) const { return (scores - largest) / temperature; }

  ATOM_INLINE uint32_t bits(int64_t i) const {
    return keys.bits(uint32_t(ids == nullptr ? i : ids[i]));
  }
  // Of the scores i + `lanes`; those from `end` on are not read.
  ATOM_INLINE vint bits(int64_t i, vuint lanes, int64_t end) const {
    vuint tokens = lanes + uint32_t(i);
    if (ids != nullptr && end - i >= kLanes) {
      std::memcpy(&tokens, ids + i, sizeof tokens);
    } else if (ids != nullptr) {
      std::memcpy(&tokens, ids + i, (end - i) * sizeof *ids);
    }
    return keys.bits(tokens);
  }
};

// The best of the tokens that took part. Of the many that cannot win only a bound is computed, of
// the others the numbers as they are: rounded once, so that they are those of any other
// implementation but for its own errors.
class Race {
 public:
  explicit Race(const Odds& odds) : odds_(odds) { raise_bar(); }

  int64_t winner() const { return winner_; }

  // Tokens from `begin` to `end`.
  void run(int64_t begin, int64_t end) {
    const float inverse = std::min(1.0f / odds_.temperature, 3e38f);
    vuint lanes;
    for (int i = 0; i < kLanes; ++i) lanes[i] = uint32_t(i);
    for (int64_t i = begin; i < end; i += kLanes) {
      const vfloat x = (load_scores(odds_.scores + i, end - i) - odds_.largest) * inverse;
      if (!any(x >= least_exponent_)) continue;
      const vfloat noise = uniform(odds_.bits(i, lanes, end));
      const vint may_win = exp(x) >= noise * bar_;
      if (!any(may_win)) continue;
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, end - i); ++lane) {
        if (may_win[lane]) enter(i + lane);
      }
    }
  }

  // One token, whose weight is known but for its last bits.
  void run_one(int64_t token, float weight) {
    if (weight >= uniform(odds_.bits(token)) * bar_) enter(token);
  }

  void join(const Race& other) {
    if (other.winner_ >= 0) compare(other.winner_, other.best_);
  }

  void enter(int64_t token) {
    const float weight = float(std::exp(double(odds_.exponent(odds_.scores[token]))));
    if (weight < odds_.min_p) return;
    const float noise = uniform(odds_.bits(token));
    compare(token, weight / float(-std::log1p(-double(noise))));
  }

 private:
  void compare(int64_t token, float value) {
    if (value < best_ || (value == best_ && (token > winner_ || value == 0))) return;
    best_ = value;
    winner_ = token;
    raise_bar();
  }

  // To the best, less than that by more than the bounds of weight and noise may be wrong.
  void raise_bar() {
    constexpr float kSlack = 1.0f - 1e-3f;
    constexpr float kLongest = 22.19f;  // v is at least 2^-32
    bar_ = best_ * kSlack;
    least_exponent_ = std::max(std::log(bar_) - kLongest, std::log(odds_.min_p) - 1e-3f);
  }

  Odds odds_;
  float best_ = 0, bar_ = 0, least_exponent_ = -kInfinity;
  int64_t winner_ = -1;
};

}  // namespace atom
