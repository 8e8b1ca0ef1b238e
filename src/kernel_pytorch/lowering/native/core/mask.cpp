#include "core/mask.h"

#include <algorithm>

namespace kernel_pytorch {
namespace {

enum Kind : int64_t { kFull, kCausal, kWindow, kSinks, kPrefix, kDocuments, kBlocks, kAnd, kOr, kPart };
constexpr int kMostNodes = 4096;
constexpr int kDeepest = 64;
constexpr int64_t kMostRuns = int64_t{1} << 24;
constexpr int64_t kFar = int64_t{1} << 40;  // beyond every position, small enough to be added to one

int children_of(int64_t kind) { return kind == kAnd || kind == kOr ? 2 : kind == kDocuments || kind == kPart ? 1 : 0; }

int64_t put(Run* out, int64_t first, int64_t last, int64_t length) {
  *out = {std::max<int64_t>(first, 0), std::min(last, length)};
  return out->last > out->first ? 1 : 0;
}

// Both sorted and disjoint; so is the result, which has at most a + b runs.
int64_t intersect(const Run* a, int64_t a_count, const Run* b, int64_t b_count, Run* out) {
  int64_t found = 0;
  for (int64_t i = 0, j = 0; i < a_count && j < b_count;) {
    const Run both = {std::max(a[i].first, b[j].first), std::min(a[i].last, b[j].last)};
    if (both.last > both.first) out[found++] = both;
    a[i].last < b[j].last ? ++i : ++j;
  }
  return found;
}

int64_t unite(const Run* a, int64_t a_count, const Run* b, int64_t b_count, Run* out) {
  int64_t found = 0;
  for (int64_t i = 0, j = 0; i < a_count || j < b_count;) {
    const bool from_a = j >= b_count || (i < a_count && a[i].first <= b[j].first);
    const Run next = from_a ? a[i++] : b[j++];
    if (found > 0 && next.first <= out[found - 1].last) {
      out[found - 1].last = std::max(out[found - 1].last, next.last);
    } else {
      out[found++] = next;
    }
  }
  return found;
}

}  // namespace

bool Mask::read(const int64_t* code, size_t size, Reason& reason) {
  // The code is read from its end, where each node's kind and count stand, and then built front to back.
  struct Piece {
    size_t start;
    int64_t kind, count;
  };
  std::vector<Piece> pieces;
  for (size_t end = size; end > 0;) {
    if (end < 2) return reason.set("the mask's code is cut short");
    const int64_t kind = code[end - 2], count = code[end - 1];
    if (kind < kFull || kind > kPart || count < 0 || static_cast<uint64_t>(count) > end - 2) {
      return reason.set("the mask's code holds an unknown node");
    }
    if (kind == kPart) return reason.set("the mask is a part of another; parts are for ranks and are not lowered");
    end -= 2 + static_cast<size_t>(count);
    pieces.push_back({end, kind, count});
    if (pieces.size() > kMostNodes) return reason.set("the mask has more than %d nodes", kMostNodes);
  }
  nodes_.clear();
  nodes_.reserve(pieces.size());
  std::vector<int32_t> stack;
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
    if (!read_node(piece->kind, code + piece->start, piece->count, stack, reason)) return false;
  }
  if (stack.size() != 1) return reason.set("the mask's code is not one expression");
  work_runs_ = 0;
  for (const Node& node : nodes_) work_runs_ += node.most_runs;
  if (work_runs_ > kMostRuns) return reason.set("the mask has too many runs");
  return true;
}

bool Mask::read_node(int64_t kind, const int64_t* numbers, int64_t count, std::vector<int32_t>& stack,
                     Reason& reason) {
  Node node;
  node.kind = kind;
  node.numbers.assign(numbers, numbers + count);
  const int wanted = children_of(kind);
  if (stack.size() < static_cast<size_t>(wanted)) return reason.set("the mask's code is cut short");
  for (int n = wanted - 1; n >= 0; --n) {
    node.children[n] = stack.back();
    stack.pop_back();
    node.depth = std::max(node.depth, nodes_[node.children[n]].depth + 1);
  }
  if (node.depth > kDeepest) return reason.set("the mask is nested deeper than %d", kDeepest);
  const auto wrong = [&] { return reason.set("the mask's code has wrong numbers for node kind %lld", (long long)kind); };
  if (kind == kAnd || kind == kOr) {
    if (count != 0) return wrong();
    node.most_runs = nodes_[node.children[0]].most_runs + nodes_[node.children[1]].most_runs;
  } else if (kind == kDocuments) {
    if (count < 1 || numbers[0] < 1 || numbers[0] > count) return wrong();
    int64_t at = 1, total = -1;
    for (int64_t entry = 0; entry < numbers[0]; ++entry) {
      if (at >= count || numbers[at] < 1 || numbers[at] > count - at - 1) return wrong();
      node.begins.push_back(static_cast<int64_t>(node.starts.size()));
      int64_t sum = 0;
      for (int64_t n = 0; n < numbers[at]; ++n) {
        const int64_t length = numbers[at + 1 + n];
        if (length < 0 || length > kFar || sum > kFar) return wrong();
        node.starts.push_back(sum);
        sum += length;
      }
      node.starts.push_back(sum);
      if (total >= 0 && sum != total) return wrong();
      total = sum;
      at += 1 + numbers[at];
    }
    if (at != count) return wrong();
    node.begins.push_back(static_cast<int64_t>(node.starts.size()));
    // Local positions exist for masks of positions alone.
    std::vector<int32_t> open = {node.children[0]};
    while (!open.empty()) {
      const Node& inner = nodes_[open.back()];
      open.pop_back();
      if (inner.kind == kDocuments || inner.kind == kBlocks) return wrong();
      for (int32_t child : inner.children) {
        if (child >= 0) open.push_back(child);
      }
    }
    node.most_runs = nodes_[node.children[0]].most_runs;
  } else if (kind == kBlocks) {
    if (count < 5) return wrong();
    for (int n = 0; n < 5; ++n) {
      if (n != 3 && (numbers[n] < 1 || numbers[n] > kFar)) return wrong();
    }
    int64_t rows;
    if (__builtin_mul_overflow(numbers[0], numbers[1], &rows) || __builtin_mul_overflow(rows, numbers[2], &rows) ||
        rows > count - 5) {
      return wrong();
    }
    int64_t at = 5 + rows;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t kept = numbers[5 + row];
      if (kept < 0 || kept > count - at) return wrong();
      node.starts.push_back(at);
      int64_t runs = 0;
      for (int64_t n = at; n < at + kept; ++n) {
        const int64_t column = numbers[n];
        if (column < 0 || column > kFar || (numbers[3] >= 0 && column >= numbers[3])) return wrong();
        if (n > at && column <= numbers[n - 1]) return wrong();
        if (n == at || column != numbers[n - 1] + 1) ++runs;
      }
      node.most_runs = std::max(node.most_runs, runs);
      at += kept;
    }
    if (at != count) return wrong();
    node.starts.push_back(at);
  } else {
    if (count != (kind == kWindow ? 2 : kind == kSinks || kind == kPrefix ? 1 : 0)) return wrong();
    for (int64_t& number : node.numbers) {
      if (number < 0) return wrong();
      number = std::min(number, kFar);
    }
  }
  stack.push_back(static_cast<int32_t>(nodes_.size()));
  nodes_.push_back(std::move(node));
  return true;
}

bool Mask::fits(const MaskLengths& lengths, Reason& reason) const {
  const auto shared = [](int64_t own, int64_t all) { return own == 1 || own == all; };
  for (const Node& node : nodes_) {
    const auto& numbers = node.numbers;
    if (node.kind == kDocuments) {
      if (node.starts.back() != lengths.keys) {
        return reason.set("the mask's documents have %lld keys in all and there are %lld",
                          (long long)node.starts.back(), (long long)lengths.keys);
      }
      if (!shared(numbers[0], lengths.batch)) return reason.set("the mask is for another batch");
    } else if (node.kind == kBlocks) {
      const int64_t block = numbers[4];
      const int64_t rows = (lengths.queries + block - 1) / block, columns = (lengths.keys + block - 1) / block;
      int64_t widest = numbers[3];
      for (size_t n = static_cast<size_t>(node.starts.front()); numbers[3] < 0 && n < numbers.size(); ++n) {
        widest = std::max(widest, numbers[n] + 1);
      }
      if (numbers[2] != rows || (numbers[3] >= 0 ? widest != columns : widest > columns)) {
        return reason.set("the mask's table does not fit %lld queries and %lld keys", (long long)lengths.queries,
                          (long long)lengths.keys);
      }
      if (!shared(numbers[0], lengths.batch)) return reason.set("the mask is for another batch");
      if (!shared(numbers[1], lengths.heads)) return reason.set("the mask is for another number of heads");
    }
  }
  return true;
}

int64_t Mask::runs(const MaskLengths& lengths, int64_t batch, int64_t head, int64_t query, Run* out,
                   Run* work) const {
  const Query at = {batch, head, query, query + lengths.keys - lengths.queries, lengths.keys, lengths.keys};
  return evaluate(nodes_.back(), at, out, work);
}

int64_t Mask::evaluate(const Node& node, const Query& at, Run* out, Run*& work) const {
  const auto& numbers = node.numbers;
  switch (node.kind) {
    case kFull:
      return put(out, 0, at.length, at.length);
    case kCausal:
      return put(out, 0, at.position + 1, at.length);
    case kWindow:
      return put(out, at.position - numbers[0], at.position + numbers[1] + 1, at.length);
    case kSinks:
      return put(out, 0, numbers[0], at.length);
    case kPrefix:
      return put(out, 0, at.position < numbers[0] ? numbers[0] : 0, at.length);
    case kAnd:
    case kOr: {
      const Node &left = nodes_[node.children[0]], &right = nodes_[node.children[1]];
      Run* const a = work;
      Run* const b = work + left.most_runs;
      work += left.most_runs + right.most_runs;
      const int64_t a_count = evaluate(left, at, a, work), b_count = evaluate(right, at, b, work);
      return node.kind == kAnd ? intersect(a, a_count, b, b_count, out) : unite(a, a_count, b, b_count, out);
    }
    case kDocuments: {
      if (at.position < 0) return 0;
      const int64_t entry = numbers[0] == 1 ? 0 : at.batch;
      const int64_t* const begin = node.starts.data() + node.begins[entry];
      const int64_t* const end = node.starts.data() + node.begins[entry + 1];
      // The last document that begins at or before the position: empty ones share their start with the next.
      const int64_t* const own = std::upper_bound(begin, end, at.position) - 1;
      Query local = at;
      local.position -= *own;
      local.length = own[1] - *own;
      const int64_t count = evaluate(nodes_[node.children[0]], local, out, work);
      for (int64_t n = 0; n < count; ++n) {
        out[n].first += *own;
        out[n].last += *own;
      }
      return count;
    }
    default: {
      const int64_t entry = numbers[0] == 1 ? 0 : at.batch, head = numbers[1] == 1 ? 0 : at.head;
      const int64_t row = (entry * numbers[1] + head) * numbers[2] + at.index / numbers[4];
      int64_t found = 0;
      for (int64_t n = node.starts[row]; n < node.starts[row + 1]; ++n) {
        const Run tile = {numbers[n] * numbers[4], std::min((numbers[n] + 1) * numbers[4], at.keys)};
        if (found > 0 && out[found - 1].last == tile.first) {
          out[found - 1].last = tile.last;
        } else {
          out[found++] = tile;
        }
      }
      return found;
    }
  }
}

}  // namespace kernel_pytorch
