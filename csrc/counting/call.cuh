// The arguments of one call, for host and device; gimbal_kernels/counting/words.py writes them in this order.
#pragma once

namespace gimbal::counting {

using Int64 = long long;

// Every field takes 8 bytes. Tables and counters begin at the layer.
struct Call {
  const void* ids;            // [rows, top_k]
  void* out;                  // [rows, top_k], the type of ids; may be ids
  const int* replicas;        // [sources, experts, width]
  const int* nearest;         // [sources, experts]
  const int* thresholds;      // [sources, experts, width], or null: even shares
  void* counts;               // [sources, experts]
  void* load;                 // [slots], or null
  const void* source_of_row;  // [rows], or null: `source` holds for all rows
  const void* num_tokens;     // one integer of 4 or 8 bytes, or null
  const void* enabled;        // one integer of `enabled_bytes`, or null
  Int64 rows, top_k, counted_rows;
  Int64 sources, experts, slots, width, source;
  Int64 ids_row_stride, ids_column_stride, out_row_stride, out_column_stride, source_stride;
  Int64 types;  // of what is 64 bits wide, see TypeBit
  Int64 enabled_bytes;
};

enum TypeBit { kIds, kCounts, kLoad, kSources, kNumTokens };

}  // namespace gimbal::counting
