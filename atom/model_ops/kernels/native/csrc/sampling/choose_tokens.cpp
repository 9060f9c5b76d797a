// Samples a token for each row: the largest score, or the winner of a race among the tokens
// that min_p, top_k and top_p keep.
#include "sampling/filter.h"

namespace atom {
namespace {

struct ChooseArgs {
  const float* scores;       // [rows, vocab_size]
  const float* temperature;  // [rows]; not above 0 for the largest. Null: all rows
  const int32_t* top_k;      // [rows] or null, like the others below
  const float* top_p;
  const float* min_p;
  const int64_t* seeds;  // [rows]
  const int64_t* positions;
  const int32_t* ids;  // [vocab_size], the token of each score; null: its own number
  int64_t* token_ids;  // [rows]; where there is none -1, or for a draft any
  float* confidences;  // [rows], the probability of each token; or null
  int64_t rows, vocab_size, threads;
  int64_t is_draft, ahead;  // the token's position is so far beyond `positions`
  double scale;             // of the temperatures
};

// What is known of a row between the passes.
struct Row {
  bool is_random, is_filtered, is_finite;
  int64_t best;  // the first score that is the largest
  float width;   // of all its scores
  Odds odds;
  Limits limits;
};

// What a part of a random row yields: its winner, or its likely tokens and the sum of weights.
struct PartResult {
  Race race;
  int64_t count;
  double total;  // where somebody asks for it
};

class Chooser {
 public:
  explicit Chooser(const ChooseArgs& args)
      : a(args),
        parts(num_parts(args.vocab_size)),
        whole(has_whole_rows(args.rows, args.vocab_size, args.threads)) {
    static thread_local Scratch of_extents, of_rows, of_results, of_tokens;
    extents = of_extents.get<Extent>(a.rows * parts);
    rows = of_rows.get<Row>(a.rows);
    if (!has_visits()) return;
    results = of_results.get<PartResult>(a.rows * parts);
    const bool filters = is_random() && (a.top_k != nullptr || a.top_p != nullptr);
    if (filters && !whole) tokens = of_tokens.get<int32_t>(a.rows * a.vocab_size);
  }

  void run() {
    const auto measure = [this](int64_t row, int64_t p) { this->measure(row, p); };
    const auto open = [this](int64_t row) { this->open(row); };
    const auto visit = [this](int64_t row, int64_t p) { this->visit(row, p); };
    const auto decide = [this](int64_t row) { this->decide(row); };
    if (!has_visits()) {
      run_rows(a.rows, a.vocab_size, a.threads, Pass{measure, open});
    } else {
      run_rows(a.rows, a.vocab_size, a.threads, Pass{measure, open}, Pass{visit, decide});
    }
  }

 private:
  bool is_random() const { return a.temperature != nullptr; }
  bool has_visits() const { return is_random() || a.confidences != nullptr; }
  const float* scores(int64_t row) const { return a.scores + row * a.vocab_size; }

  // Room for all tokens of a row, seen by every thread that works on it.
  int32_t* tokens_of(int64_t row) const {
    static thread_local Scratch own;
    return whole ? own.get<int32_t>(a.vocab_size) : tokens + row * a.vocab_size;
  }

  void measure(int64_t row, int64_t p) {
    const Span span = part_of(p, a.vocab_size);
    extents[row * parts + p] = atom::measure(scores(row) + span.begin, span.end - span.begin);
  }

  // The token of a greedy row; the options of another.
  void open(int64_t r) {
    const Largest found = find_largest(scores(r), a.vocab_size, extents + r * parts);
    const float largest = found.extent.largest;
    Row& row = rows[r];
    row.is_random = false;
    row.best = found.token;
    row.is_finite = std::isfinite(largest);
    if (!has_visits()) return write(r, found_best(row), 0);
    row.odds = {scores(r), a.ids, largest, 1, 0, Keys()};
    row.is_filtered = false;
    if (!is_random() || !(a.temperature[r] > 0) || !row.is_finite) return;
    row.is_random = true;
    row.width = largest - found.extent.smallest;
    constexpr float kLeast = std::numeric_limits<float>::min();
    row.odds.temperature = std::max(a.temperature[r] * float(a.scale), kLeast);
    row.odds.min_p = a.min_p == nullptr ? 0 : a.min_p[r];
    row.odds.keys = Keys(a.seeds[r], a.positions[r] + a.ahead);
    row.limits = {a.top_k == nullptr ? a.vocab_size : a.top_k[r],
                  a.top_p == nullptr ? 1 : a.top_p[r]};
    row.is_filtered = row.limits.top_k < a.vocab_size || row.limits.top_p < 1;
  }

  void visit(int64_t r, int64_t p) {
    const Row& row = rows[r];
    PartResult& result = results[r * parts + p];
    const Span span = part_of(p, a.vocab_size);
    result.total = 0;
    if (row.is_filtered) {
      double* total = row.limits.top_k < a.vocab_size ? nullptr : &result.total;
      result.count = collect(row.odds, span, kFirstReach, tokens_of(r) + span.begin, total);
      return;
    }
    if (row.is_random) {
      result.race = Race(row.odds);
      result.race.enter(row.best);  // it sets the bar
      result.race.run(span.begin, span.end);
    }
    if (a.confidences != nullptr && row.is_finite) {
      collect(row.odds, span, kFirstReach, nullptr, &result.total);
    }
  }

  void decide(int64_t r) {
    const Row& row = rows[r];
    if (row.is_filtered) return run_filtered(r);
    double total = 0;
    Race race(row.odds);
    for (int64_t p = 0; p < parts; ++p) {
      const PartResult& part = results[r * parts + p];
      total += part.total;
      if (row.is_random) race.join(part.race);
    }
    write(r, row.is_random ? race.winner() : found_best(row), total);
  }

  static int64_t found_best(const Row& row) { return row.is_finite ? row.best : -1; }

  // The token of a row; the weights of all that took part are `total` together.
  void write(int64_t r, int64_t winner, double total) const {
    const Odds& odds = rows[r].odds;
    if (a.confidences != nullptr) {
      const float weight = winner < 0 ? 0 : std::exp(odds.exponent(odds.scores[winner]));
      a.confidences[r] = winner < 0 ? 0 : float(weight / total);
    }
    if (winner < 0 && a.is_draft) winner = rows[r].best;
    a.token_ids[r] = winner < 0 || a.ids == nullptr ? winner : a.ids[winner];
  }

  void run_filtered(int64_t r) const {
    const Row& row = rows[r];
    int32_t* found = tokens_of(r);
    int64_t count = 0;
    double total = 0;
    for (int64_t p = 0; p < parts; ++p) {
      const PartResult& part = results[r * parts + p];
      std::memmove(found + count, found + p * kPart, part.count * sizeof(int32_t));
      count += part.count;
      total += part.total;
    }
    Race race(row.odds);
    double kept = 0;
    if (!keep(row, kFirstReach, found, count, total, race, kept)) {
      count = collect(row.odds, {0, a.vocab_size}, kReach, found, nullptr);
      keep(row, kReach, found, count, total, race, kept);
    }
    write(r, race.winner(), kept);
  }

  // Runs the race of the tokens that the filters keep, and adds their weights. False if more than
  // the given ones may be kept.
  bool keep(const Row& row, float reach, const int32_t* found, int64_t count, double total,
            Race& race, double& kept) const {
    static thread_local Scratch scratch;
    const float width = std::min(reach * row.odds.temperature, row.width);
    Candidates candidates(row.odds, found, count, width, scratch);
    const auto [top_k, top_p] = row.limits;
    const bool has_all = reach >= kReach;
    Candidates::Cut cut = {~uint64_t{0}, 0, false};
    if (top_k < a.vocab_size) {
      cut = candidates.cut(top_k, kInfinity);
      if (!cut.found && !has_all) return false;
      total = cut.mass;
    }
    if (top_p < 1) cut = candidates.cut(top_k, double(top_p) * total);
    if (!cut.found && !has_all) return false;
    candidates.run(cut.end, race);
    kept = cut.mass;
    return true;
  }

  const ChooseArgs& a;
  const int64_t parts;
  const bool whole;
  Extent* extents;
  Row* rows;
  PartResult* results = nullptr;
  int32_t* tokens = nullptr;
};

}  // namespace
}  // namespace atom

ATOM_EXPORT int64_t atom_choose_tokens(const atom::ChooseArgs* args) {
  atom::Chooser(*args).run();
  return 0;
}
