// A mask of kp.masks as data: evaluates to the ranges of keys that a query attends to. Mirrors masks/code.py.
#pragma once

#include <vector>

#include "core/types.h"

namespace kernel_pytorch {

struct MaskLengths {
  int64_t batch;
  int64_t heads;
  int64_t queries;
  int64_t keys;
};

class Mask {
 public:
  // Reads and validates the postfix code.
  bool read(const int64_t* code, size_t size, Reason& reason);

  // Whether the mask is defined for these lengths. Required before ranges() is called with them.
  bool fits(const MaskLengths& lengths, Reason& reason) const;

  // Writes the sorted, disjoint ranges of one query to `out` and returns how many; at most max_ranges(). `work` is
  // scratch for work_ranges() of them.
  int64_t ranges(const MaskLengths& lengths, int64_t batch, int64_t head, int64_t query, KeyRange* out,
                 KeyRange* work) const;

  int64_t max_ranges() const { return nodes_.empty() ? 1 : nodes_.back().max_ranges; }
  int64_t work_ranges() const { return work_ranges_; }

 private:
  struct Node {
    format::MaskNode kind;
    std::vector<int64_t> numbers;
    int32_t children[2] = {-1, -1};
    int32_t depth = 1;
    int64_t max_ranges = 1;
    std::vector<int64_t> starts;  // documents: first position of each, by batch entry; blocks: first index of each row
    std::vector<int64_t> begins;  // documents: index of the first entry of `starts` for each batch entry
  };
  struct Query {
    int64_t batch, head, index, position, length, keys;
  };

  bool read_node(format::MaskNode kind, const int64_t* numbers, int64_t count, std::vector<int32_t>& stack,
                 Reason& reason);
  int64_t evaluate(const Node& node, const Query& query, KeyRange* out, KeyRange*& work) const;

  std::vector<Node> nodes_;  // children before their parents; the last is the root
  int64_t work_ranges_ = 0;
};

}  // namespace kernel_pytorch
