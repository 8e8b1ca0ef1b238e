// The key ranges of one tile of attention: those of each row, and their union, in the scratch of one worker.
#pragma once

#include <algorithm>
#include <climits>
#include <cstring>

#include "kernels/table.h"

namespace kernel_pytorch {

class TileRanges {
 public:
  // The bytes that a worker needs, with `kernel_bytes` for the kernel; at most `max_ranges` for each row.
  static size_t bytes(int64_t max_ranges, int64_t work_ranges, size_t kernel_bytes) {
    return static_cast<size_t>(max_ranges) *
               (2 * sizeof(int32_t) * kMaxTileRows + sizeof(KeyRange) * (kMaxTileRows + 1)) +
           static_cast<size_t>(work_ranges) * sizeof(KeyRange) + kernel_bytes + 256;
  }

  TileRanges(char* memory, int64_t max_ranges, int64_t work_ranges) : max_ranges_(max_ranges) {
    ranges_ = reinterpret_cast<KeyRange*>(memory);
    own_ = ranges_ + max_ranges * kMaxTileRows;
    work_ = own_ + max_ranges;
    begin_ = reinterpret_cast<int32_t*>(work_ + work_ranges);
    end_ = begin_ + max_ranges * kMaxTileRows;
    kernel_ = reinterpret_cast<float*>(align_up(reinterpret_cast<char*>(end_ + max_ranges * kMaxTileRows)));
  }

  float* kernel_scratch() const { return kernel_; }

  void clear() {
    count_ = 0;
    previous_ = -1;
  }

  // Sets the ranges of one row, from `ranges(out, work)`, which writes them sorted and returns how many.
  template <typename Ranges>
  void add_row(int64_t row, const Ranges& ranges) {
    const int64_t count = ranges(own_, work_);
    for (int64_t n = 0; n < max_ranges_; ++n) {
      begin_[n * kMaxTileRows + row] = n < count ? static_cast<int32_t>(own_[n].begin) : 0;
      end_[n * kMaxTileRows + row] = n < count ? static_cast<int32_t>(own_[n].end) : 0;
    }
    const bool same = count == previous_ &&
                      std::memcmp(own_, ranges_ + count_ - count, sizeof(KeyRange) * static_cast<size_t>(count)) == 0;
    if (same) return;
    std::copy(own_, own_ + count, ranges_ + count_);
    count_ += count;
    previous_ = count;
  }

  // Gives the ranges to a tile whose rows were all added.
  void put_into(AttentionTile& tile) {
    // Rows past the end cover all keys, so that they never make a block of keys partial.
    for (int64_t n = 0; n < max_ranges_; ++n) {
      std::fill(begin_ + n * kMaxTileRows + tile.rows, begin_ + (n + 1) * kMaxTileRows, 0);
      std::fill(end_ + n * kMaxTileRows + tile.rows, end_ + (n + 1) * kMaxTileRows, INT_MAX);
    }
    tile.begin = begin_;
    tile.end = end_;
    tile.ranges_per_row = max_ranges_;
    tile.ranges = ranges_;
    tile.range_count = merge();
  }

 private:
  // Sorts the ranges of all rows and merges those that overlap or touch; returns how many are left.
  int64_t merge() {
    std::sort(ranges_, ranges_ + count_, [](const KeyRange& a, const KeyRange& b) { return a.begin < b.begin; });
    int64_t merged = 0;
    for (int64_t n = 0; n < count_; ++n) {
      if (merged > 0 && ranges_[n].begin <= ranges_[merged - 1].end) {
        ranges_[merged - 1].end = std::max(ranges_[merged - 1].end, ranges_[n].end);
      } else {
        ranges_[merged++] = ranges_[n];
      }
    }
    return merged;
  }

  int64_t max_ranges_;
  KeyRange* ranges_;  // of all rows of a tile
  KeyRange* own_;     // of one row
  KeyRange* work_;
  int32_t* begin_;  // [range][row]
  int32_t* end_;
  float* kernel_;
  int64_t count_ = 0;
  int64_t previous_ = -1;  // number of ranges of the row before, which end at ranges_ + count_
};

}  // namespace kernel_pytorch
