// A mask of kp.masks as data: for a query, the runs of keys it attends to. Mirrors kernel_pytorch/masks/code.py.
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
  // Reads the postfix code; one that kp.masks could not have made is refused.
  bool read(const int64_t* code, size_t size, Reason& reason);

  // Whether the mask fits these lengths; must be true before runs() is called with them.
  bool fits(const MaskLengths& lengths, Reason& reason) const;

  // The sorted, disjoint runs of one query, written to `out`; returns how many. `work` holds work_runs() of them.
  int64_t runs(const MaskLengths& lengths, int64_t batch, int64_t head, int64_t query, Run* out, Run* work) const;

  int64_t most_runs() const { return nodes_.empty() ? 1 : nodes_.back().most_runs; }
  int64_t work_runs() const { return work_runs_; }
  bool is_full() const { return nodes_.size() == 1 && nodes_[0].kind == 0; }

 private:
  struct Node {
    int64_t kind;
    std::vector<int64_t> numbers;
    int32_t children[2] = {-1, -1};
    int32_t depth = 1;
    int64_t most_runs = 1;
    std::vector<int64_t> starts;  // documents: where each begins, by batch entry; blocks: where each row begins
    std::vector<int64_t> begins;  // documents: the first of `starts` of each batch entry
  };
  struct Query {
    int64_t batch, head, index, position, length, keys;
  };

  bool read_node(int64_t kind, const int64_t* numbers, int64_t count, std::vector<int32_t>& stack, Reason& reason);
  int64_t evaluate(const Node& node, const Query& query, Run* out, Run*& work) const;

  std::vector<Node> nodes_;  // children before their parents; the last is the whole mask
  int64_t work_runs_ = 0;
};

}  // namespace kernel_pytorch
