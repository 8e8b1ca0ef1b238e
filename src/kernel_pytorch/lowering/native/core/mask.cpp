#include "core/mask.h"

#include <algorithm>

namespace kernel_pytorch {
namespace {

using format::MaskNode;

constexpr int kMaxNodes = 4096;
constexpr int kMaxDepth = 64;
constexpr int64_t kMaxRanges = int64_t{1} << 24;
constexpr int64_t kMaxOffsets = 256;        // of a dilated window to each side
constexpr int64_t kFar = int64_t{1} << 40;  // larger than every position; sums with positions do not overflow

// masks/code.py lists the others as NOT_IN_RUNTIME.
bool is_supported(MaskNode kind) { return kind != MaskNode::kPart; }

// Whether a mask of this kind has no local positions, so that no document can contain it.
bool is_of_whole_sequence(MaskNode kind) {
  return kind == MaskNode::kDocuments || kind == MaskNode::kBlocks || kind == MaskNode::kIntervals ||
         kind == MaskNode::kPadding;
}

int child_count(MaskNode kind) {
  if (kind == MaskNode::kAnd || kind == MaskNode::kOr) return 2;
  return kind == MaskNode::kDocuments ? 1 : 0;
}

int64_t put(KeyRange* out, int64_t begin, int64_t end, int64_t length) {
  *out = {std::max<int64_t>(begin, 0), std::min(end, length)};
  return out->end > out->begin ? 1 : 0;
}

// Merges sorted ranges that overlap or touch; returns how many are left.
int64_t joined(KeyRange* ranges, int64_t count) {
  int64_t merged = 0;
  for (int64_t n = 0; n < count; ++n) {
    if (merged > 0 && ranges[n].begin <= ranges[merged - 1].end) {
      ranges[merged - 1].end = std::max(ranges[merged - 1].end, ranges[n].end);
    } else {
      ranges[merged++] = ranges[n];
    }
  }
  return merged;
}

// Operands and result are sorted and disjoint; the result has at most a_count + b_count ranges.
int64_t intersect(const KeyRange* a, int64_t a_count, const KeyRange* b, int64_t b_count, KeyRange* out) {
  int64_t count = 0;
  for (int64_t i = 0, j = 0; i < a_count && j < b_count;) {
    const KeyRange both = {std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end)};
    if (both.end > both.begin) out[count++] = both;
    a[i].end < b[j].end ? ++i : ++j;
  }
  return count;
}

int64_t unite(const KeyRange* a, int64_t a_count, const KeyRange* b, int64_t b_count, KeyRange* out) {
  int64_t count = 0;
  for (int64_t i = 0, j = 0; i < a_count || j < b_count;) {
    const bool from_a = j >= b_count || (i < a_count && a[i].begin <= b[j].begin);
    const KeyRange next = from_a ? a[i++] : b[j++];
    if (count > 0 && next.begin <= out[count - 1].end) {
      out[count - 1].end = std::max(out[count - 1].end, next.end);
    } else {
      out[count++] = next;
    }
  }
  return count;
}

}  // namespace

bool Mask::read(const int64_t* code, size_t size, Reason& reason) {
  // Kind and count follow the numbers of a node: split the code from its end, then build the nodes from the front.
  struct Piece {
    size_t start;
    MaskNode kind;
    int64_t count;
  };
  std::vector<Piece> pieces;
  for (size_t end = size; end > 0;) {
    if (end < 2) return reason.set("the mask's code is cut short");
    const int64_t kind = code[end - 2], count = code[end - 1];
    if (!format::is_one_of<MaskNode>(kind) || count < 0 || static_cast<uint64_t>(count) > end - 2) {
      return reason.set("the mask's code has an unknown node");
    }
    if (!is_supported(static_cast<MaskNode>(kind))) {
      return reason.set("the mask has a node of kind %lld, which the runtime does not support",
                        static_cast<long long>(kind));
    }
    end -= 2 + static_cast<size_t>(count);
    pieces.push_back({end, static_cast<MaskNode>(kind), count});
    if (pieces.size() > kMaxNodes) return reason.set("the mask has more than %d nodes", kMaxNodes);
  }
  nodes_.clear();
  nodes_.reserve(pieces.size());
  std::vector<int32_t> stack;
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
    if (!read_node(piece->kind, code + piece->start, piece->count, stack, reason)) return false;
  }
  if (stack.size() != 1) return reason.set("the mask's code is not one expression");
  work_ranges_ = 0;
  for (const Node& node : nodes_) work_ranges_ += node.max_ranges;
  if (work_ranges_ > kMaxRanges) return reason.set("the mask has too many ranges");
  return true;
}

bool Mask::read_node(MaskNode kind, const int64_t* numbers, int64_t count, std::vector<int32_t>& stack,
                     Reason& reason) {
  Node node;
  node.kind = kind;
  node.numbers.assign(numbers, numbers + count);
  const int children = child_count(kind);
  if (stack.size() < static_cast<size_t>(children)) return reason.set("the mask's code is cut short");
  for (int n = children - 1; n >= 0; --n) {
    node.children[n] = stack.back();
    stack.pop_back();
    node.depth = std::max(node.depth, nodes_[node.children[n]].depth + 1);
  }
  if (node.depth > kMaxDepth) return reason.set("the mask is nested deeper than %d", kMaxDepth);
  const auto wrong = [&] {
    return reason.set("the mask's code has wrong numbers for node kind %lld", static_cast<long long>(kind));
  };
  if (kind == MaskNode::kAnd || kind == MaskNode::kOr) {
    if (count != 0) return wrong();
    node.max_ranges = nodes_[node.children[0]].max_ranges + nodes_[node.children[1]].max_ranges;
  } else if (kind == MaskNode::kDocuments) {
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
    // Only masks of positions can be evaluated inside a document.
    std::vector<int32_t> open = {node.children[0]};
    while (!open.empty()) {
      const Node& inner = nodes_[open.back()];
      open.pop_back();
      if (is_of_whole_sequence(inner.kind)) return wrong();
      for (int32_t child : inner.children) {
        if (child >= 0) open.push_back(child);
      }
    }
    node.max_ranges = nodes_[node.children[0]].max_ranges;
  } else if (kind == MaskNode::kBlocks) {
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
      int64_t ranges = 0;
      for (int64_t n = at; n < at + kept; ++n) {
        const int64_t column = numbers[n];
        if (column < 0 || column > kFar || (numbers[3] >= 0 && column >= numbers[3])) return wrong();
        if (n > at && column <= numbers[n - 1]) return wrong();
        if (n == at || column != numbers[n - 1] + 1) ++ranges;
      }
      node.max_ranges = std::max(node.max_ranges, ranges);
      at += kept;
    }
    if (at != count) return wrong();
    node.starts.push_back(at);
  } else if (kind == MaskNode::kIntervals) {
    // Batch entries, slots and queries; then the first keys, then the last ones.
    int64_t total;
    if (count < 3 || numbers[0] < 1 || numbers[1] < 1 || numbers[2] < 0 ||
        __builtin_mul_overflow(numbers[0], numbers[1], &total) || __builtin_mul_overflow(total, numbers[2], &total) ||
        total > (count - 3) / 2 || count - 3 != 2 * total) {
      return wrong();
    }
    for (int64_t n = 3; n < count; ++n) {
      if (numbers[n] < 0 || numbers[n] > kFar) return wrong();
    }
    node.max_ranges = numbers[1];
  } else if (kind == MaskNode::kPadding) {
    if (count < 3 || numbers[0] != count - 2 || numbers[1] < 0 || numbers[1] > 1) return wrong();
    for (int64_t n = 2; n < count; ++n) {
      if (numbers[n] < 0 || numbers[n] > kFar) return wrong();
    }
  } else if (kind == MaskNode::kDilated) {
    if (count != 3 || numbers[0] < 1 || numbers[0] > kFar) return wrong();
    if (numbers[1] < 0 || numbers[2] < 0 || numbers[1] > kMaxOffsets || numbers[2] > kMaxOffsets) return wrong();
    node.max_ranges = numbers[1] + numbers[2] + 1;
  } else {
    const bool has_one = kind == MaskNode::kSinks || kind == MaskNode::kPrefix;
    if (count != (kind == MaskNode::kWindow ? 2 : has_one ? 1 : 0)) return wrong();
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
    if (node.kind == MaskNode::kDocuments) {
      if (node.starts.back() != lengths.keys) {
        return reason.set("the mask's documents have %lld keys in all and there are %lld",
                          static_cast<long long>(node.starts.back()), static_cast<long long>(lengths.keys));
      }
      if (!shared(numbers[0], lengths.batch)) return reason.set("the mask is for another batch");
    } else if (node.kind == MaskNode::kBlocks) {
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
    } else if (node.kind == MaskNode::kIntervals || node.kind == MaskNode::kPadding) {
      if (!shared(numbers[0], lengths.batch)) return reason.set("the mask is for another batch");
      if (node.kind == MaskNode::kIntervals && numbers[2] != lengths.queries) {
        return reason.set("the mask has intervals for %lld queries and there are %lld",
                          static_cast<long long>(numbers[2]), static_cast<long long>(lengths.queries));
      }
    }
  }
  return true;
}

int64_t Mask::ranges(const MaskLengths& lengths, int64_t batch, int64_t head, int64_t query, KeyRange* out,
                     KeyRange* work) const {
  const Query at = {batch, head, query, query + lengths.keys - lengths.queries, lengths.keys, lengths.keys};
  return evaluate(nodes_.back(), at, out, work);
}

int64_t Mask::evaluate(const Node& node, const Query& at, KeyRange* out, KeyRange*& work) const {
  const auto& numbers = node.numbers;
  switch (node.kind) {
    case MaskNode::kFull:
      return put(out, 0, at.length, at.length);
    case MaskNode::kCausal:
      return put(out, 0, at.position + 1, at.length);
    case MaskNode::kWindow:
      return put(out, at.position - numbers[0], at.position + numbers[1] + 1, at.length);
    case MaskNode::kSinks:
      return put(out, 0, numbers[0], at.length);
    case MaskNode::kPrefix:
      return put(out, 0, at.position < numbers[0] ? numbers[0] : 0, at.length);
    case MaskNode::kAnd:
    case MaskNode::kOr: {
      const Node &left = nodes_[node.children[0]], &right = nodes_[node.children[1]];
      KeyRange* const a = work;
      KeyRange* const b = work + left.max_ranges;
      work += left.max_ranges + right.max_ranges;
      const int64_t a_count = evaluate(left, at, a, work), b_count = evaluate(right, at, b, work);
      return node.kind == MaskNode::kAnd ? intersect(a, a_count, b, b_count, out) : unite(a, a_count, b, b_count, out);
    }
    case MaskNode::kDocuments: {
      if (at.position < 0) return 0;
      const int64_t entry = numbers[0] == 1 ? 0 : at.batch;
      const int64_t* const begin = node.starts.data() + node.begins[entry];
      const int64_t* const end = node.starts.data() + node.begins[entry + 1];
      // The last document that begins at or before the position; an empty document has the same start as the next.
      const int64_t* const own = std::upper_bound(begin, end, at.position) - 1;
      Query local = at;
      local.position -= *own;
      local.length = own[1] - *own;
      const int64_t count = evaluate(nodes_[node.children[0]], local, out, work);
      for (int64_t n = 0; n < count; ++n) {
        out[n].begin += *own;
        out[n].end += *own;
      }
      return count;
    }
    case MaskNode::kIntervals: {
      const int64_t entry = numbers[0] == 1 ? 0 : at.batch, slots = numbers[1], rows = numbers[2];
      const int64_t* const first = numbers.data() + 3 + entry * slots * rows + at.index;
      const int64_t* const last = first + numbers[0] * slots * rows;
      int64_t count = 0;
      for (int64_t n = 0; n < slots; ++n) count += put(out + count, first[n * rows], last[n * rows], at.length);
      std::sort(out, out + count, [](const KeyRange& a, const KeyRange& b) { return a.begin < b.begin; });
      return joined(out, count);
    }
    case MaskNode::kPadding: {
      const int64_t tokens = numbers[2 + (numbers[0] == 1 ? 0 : at.batch)];
      return numbers[1] == 0 ? put(out, at.length - tokens, at.length, at.length) : put(out, 0, tokens, at.length);
    }
    case MaskNode::kDilated: {
      int64_t count = 0;
      for (int64_t n = -numbers[1]; n <= numbers[2]; ++n) {
        const int64_t key = at.position + n * numbers[0];
        if (key >= 0 && key < at.length) out[count++] = {key, key + 1};
      }
      return joined(out, count);
    }
    default: {
      const int64_t entry = numbers[0] == 1 ? 0 : at.batch, head = numbers[1] == 1 ? 0 : at.head;
      const int64_t row = (entry * numbers[1] + head) * numbers[2] + at.index / numbers[4];
      int64_t count = 0;
      for (int64_t n = node.starts[row]; n < node.starts[row + 1]; ++n) {
        const KeyRange tile = {numbers[n] * numbers[4], std::min((numbers[n] + 1) * numbers[4], at.keys)};
        if (count > 0 && out[count - 1].end == tile.begin) {
          out[count - 1].end = tile.end;
        } else {
          out[count++] = tile;
        }
      }
      return count;
    }
  }
}

}  // namespace kernel_pytorch
