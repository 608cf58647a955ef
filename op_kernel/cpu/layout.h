// The window layout as the CPU kernels see it: a vector of int64 computed by op_host/layout.py, and the words of records
// and cells. The enums repeat the order of op_host/layout.py; tests/test_layout.py compares them name by name.
#pragma once

#include <cstdint>

#include "hooks.h"

namespace moe_a2a {

enum LayoutParam : int {
  VERSION,
  FORMAT,
  WORLD_SIZE,
  NUM_EXPERTS,
  MAX_TOKENS,
  TOP_K,
  ROW_BYTES,
  RECV_ROWS,
  SLOTS,
  RECORD_SLOTS,
  SOURCE_SLOTS,
  STAGE_SLOTS,
  CODE_MAX,
  GENERATION,
  ROW_ALIGN,
  PUSH,
  PROGRESS,
  STATUS,
  STATUS_STRIDE,
  STATUS_BODY,
  STATUS_CODE,
  RECORD,
  RECORD_SLOT_STRIDE,
  RECORD_STRIDE,
  RECORD_HEADER,
  RECORD_PAYLOAD,
  RECORD_PAYLOAD_BYTES,
  RECORD_CODE,
  CELL,
  CELL_SLOT_STRIDE,
  CELL_STRIDE,
  CELL_BODY,
  CELL_TEXT,
  CELL_TEXT_BYTES,
  CELL_CODE,
  WAVE,
  WAVE_SLOT_STRIDE,
  WAVE_KIND_STRIDE,
  WAVE_STRIDE,
  WAVE_MARK,
  WAVE_CODE,
  TOKEN_LIST,
  TOKEN_LIST_SLOT_STRIDE,
  WEIGHT,
  WEIGHT_SLOT_STRIDE,
  X,
  X_SLOT_STRIDE,
  Y,
  Y_SLOT_STRIDE,
  ROW_FLAG,
  ROW_FLAG_SLOT_STRIDE,
  ROW_FLAG_STRIDE,
  ROW,
  ROW_SLOT_STRIDE,
  Z,
  Z_SLOT_STRIDE,
  TOTAL_BYTES,
  LAYOUT_PARAMS,  // how many
};

enum class Format : int64_t { COMPACT = 0, PORTABLE = 1, LINE = 2 };
enum class Mode : int32_t { PULL = 0, PUSH = 1, FUSED = 2 };
enum class Wave : int { DISPATCH_READ = 0, COMBINE_READY = 1, COMBINE_READ = 2 };

namespace kind {
enum Kind : int32_t { COUNTS = 1, ROUND = 2, ABORT = 3, LEAVE = 4 };
}
namespace status {
enum Status : int32_t { OK = 1, POISON = 2, LEFT = 3, EXCLUDED = 4 };
}
namespace phase {
enum Phase : int32_t {
  IDLE = 0,
  DISPATCH_PACK = 1,
  DISPATCH_COUNTS = 2,
  DISPATCH_ROWS = 3,
  COMBINE_WRITE = 4,
  COMBINE_WAIT = 5,
  COMBINE_SUM = 6,
  DISPATCH_PUSH = 7,
};
}
namespace record_word {
enum RecordWord : int {
  KIND = 0,
  REASON = 1,
  GENERATION = 2,
  EPOCH_LO = 3,
  EPOCH_HI = 4,
  TOKENS = 5,
  HIDDEN = 6,
  DTYPE = 7,
  QUANT = 8,
  WEIGHT_DTYPE = 9,
  TOP_K = 10,
  MODE = 11,
  PAD_LO = 12,
  PAD_HI = 13,
  ALIGN = 14,
  TAG_LO = 15,
  TAG_HI = 16,
  X_LO = 17,
  X_HI = 18,
  X_STRIDE = 19,
  TEXT_BYTES = 20,
  FLAG_ROWS = 21,
  ROUTING_LO = 22,
  ROUTING_HI = 23,
  READ_LO = 24,
  READ_HI = 25,
  ASYNC = 26,
  GRADIENTS = 27,
  IDS_LO = 28,
  IDS_HI = 29,
};
}
namespace cell_word {
enum CellWord : int { REASON = 0, DTYPE = 1, HIDDEN = 2, STRIDE = 3, Y_LO = 4, Y_HI = 5, TEXT_BYTES = 6, MODE = 7 };
}
namespace status_word {
enum StatusWord : int { REASON = 0, WHO = 1, EPOCH_LO = 2, EPOCH_HI = 3, PHASE = 4, GENERATION = 5 };
}
namespace progress_word {
enum ProgressWord : int { EPOCH = 0, PHASE = 1, VERDICT = 2 };
}
namespace handle_word {
enum HandleWord : int {
  MAGIC = 0,
  EPOCH = 1,
  GENERATION = 2,
  TOKENS = 3,
  TOP_K = 4,
  HIDDEN = 5,
  ROWS = 6,
  WORLD_SIZE = 7,
  NUM_EXPERTS = 8,
  RANK = 9,
  DTYPE = 10,
  COUNTS = 11,
  OFFSETS = 12,
  MATRIX = 13,
  EXPERT = 14,
  ROW = 15,
  GROUP = 16,
  ALIGN = 17,
  OUT_ROWS = 18,
  GRADIENTS = 19,
  IDS = 20,
};
}

constexpr int RECORD_HEADER_WORDS = 30;
constexpr int CELL_BODY_WORDS = 8;
constexpr int HANDLE_HEADER_WORDS = 21;
constexpr int CODE_BLOCK = 32;    // bytes
// GRADIENTS of a record: what the rank wants, and 16 times one more than the dtype of the weights that combine will get.
constexpr int GRADIENT_BITS = 15;
constexpr int COMBINE_WEIGHTS = 16;
constexpr int LINE = 512;         // bytes of a line of the line format: payload, then a code block
constexpr int LINE_PAYLOAD = 480;
constexpr int64_t HANDLE_MAGIC = 0x6D6F655F68646C31;

// Element types that travel; the numbers are DTYPE_CODES of op_host/layout.py. 0 is "none".
enum class Dtype : int32_t { NONE = 0, F32 = 1, BF16 = 2, F16 = 3, F64 = 4 };

constexpr int64_t itemsize(Dtype dtype) {
  return dtype == Dtype::F64 ? 8 : dtype == Dtype::F32 ? 4 : dtype == Dtype::NONE ? 0 : 2;
}

constexpr const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::F32: return "float32";
    case Dtype::BF16: return "bfloat16";
    case Dtype::F16: return "float16";
    case Dtype::F64: return "float64";
    case Dtype::NONE: return "none";
    default: return "unknown";
  }
}

// Which expert belongs to which rank: contiguous, and the first E mod R ranks own one expert more.
constexpr int64_t first_expert(int64_t rank, int64_t num_experts, int64_t world_size) {
  const int64_t share = num_experts / world_size, more = num_experts % world_size;
  return rank * share + (rank < more ? rank : more);
}

constexpr int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

// Lines that `bytes` take in the line format.
constexpr int64_t lines_for(int64_t bytes) { return (bytes + LINE_PAYLOAD - 1) / LINE_PAYLOAD; }

struct Layout {
  int64_t p[LAYOUT_PARAMS];

  int64_t operator[](LayoutParam name) const { return p[name]; }
  bool compact() const { return p[FORMAT] == static_cast<int64_t>(Format::COMPACT); }
  bool line() const { return p[FORMAT] == static_cast<int64_t>(Format::LINE); }

  // code(n) is in 1..V, 0 means never written; lap(n) counts how often the codes have wrapped.
  // V = 3: n = 1 2 3 4 5 -> code 1 2 3 1 2, lap 0 0 0 1 1
  uint64_t code(uint64_t epoch) const {
    if (dropped(Rule::CODE_IS_NEVER_ZERO)) return epoch % static_cast<uint64_t>(p[CODE_MAX]);
    return (epoch - 1) % static_cast<uint64_t>(p[CODE_MAX]) + 1;
  }
  uint64_t lap(uint64_t epoch) const { return (epoch - 1) / static_cast<uint64_t>(p[CODE_MAX]); }

  int64_t slot_of(uint64_t epoch, LayoutParam slots) const {
    if (dropped(Rule::SLOT_FROM_FULL_EPOCH)) epoch = code(epoch);
    return static_cast<int64_t>(epoch % static_cast<uint64_t>(p[slots]));
  }
  int64_t slot(uint64_t epoch) const { return dropped(Rule::SLOT_BY_DISPATCH) ? 0 : slot_of(epoch, SLOTS); }
  int64_t source_slot(uint64_t epoch) const { return dropped(Rule::SOURCE_SLOTS) ? 0 : slot_of(epoch, SOURCE_SLOTS); }
  int64_t record_slot(uint64_t epoch) const { return dropped(Rule::RECORD_SLOTS) ? 0 : slot_of(epoch, RECORD_SLOTS); }
  int64_t record_at(uint64_t epoch, int64_t source) const {
    return p[RECORD] + record_slot(epoch) * p[RECORD_SLOT_STRIDE] + source * p[RECORD_STRIDE];
  }
  int64_t cell_at(uint64_t epoch, int64_t owner) const {
    return p[CELL] + slot(epoch) * p[CELL_SLOT_STRIDE] + owner * p[CELL_STRIDE];
  }
  int64_t wave_at(uint64_t epoch, Wave what, int64_t writer) const {
    return p[WAVE] + slot(epoch) * p[WAVE_SLOT_STRIDE] + static_cast<int64_t>(what) * p[WAVE_KIND_STRIDE] +
           writer * p[WAVE_STRIDE];
  }
  int64_t status_at(int64_t source) const { return p[STATUS] + source * p[STATUS_STRIDE]; }
  int64_t list_at(uint64_t epoch) const { return p[TOKEN_LIST] + source_slot(epoch) * p[TOKEN_LIST_SLOT_STRIDE]; }
  int64_t weight_at(uint64_t epoch) const { return p[WEIGHT] + source_slot(epoch) * p[WEIGHT_SLOT_STRIDE]; }
  int64_t x_at(uint64_t epoch) const { return p[X] + source_slot(epoch) * p[X_SLOT_STRIDE]; }
  int64_t stage_at(int64_t slot) const { return p[X] + (p[SOURCE_SLOTS] + slot) * p[X_SLOT_STRIDE]; }
  int64_t y_at(uint64_t epoch) const {
    return p[Y] + (dropped(Rule::Y_SLOTS) ? 0 : slot(epoch)) * p[Y_SLOT_STRIDE];
  }
  int64_t row_at(uint64_t epoch) const { return p[ROW] + slot(epoch) * p[ROW_SLOT_STRIDE]; }
  int64_t row_flag_at(uint64_t epoch) const { return p[ROW_FLAG] + slot(epoch) * p[ROW_FLAG_SLOT_STRIDE]; }
  int64_t z_at(uint64_t epoch) const { return p[Z] + slot(epoch) * p[Z_SLOT_STRIDE]; }

  // Bytes from one row to the next where the owner of the window writes it (x, y).
  int64_t row_stride(int64_t row_bytes) const { return align_up(row_bytes, p[ROW_ALIGN]); }
  // The same where another rank writes it (row, z).
  int64_t remote_stride(int64_t row_bytes) const { return line() ? lines_for(row_bytes) * LINE : row_stride(row_bytes); }
};

// Where the parts of a handle tensor begin, in int64 words, and how many words it has: handle_words() of op_host/layout.py.
struct HandleWords {
  int64_t counts, offsets, matrix, expert, row, ids, total;

  HandleWords(int64_t pairs, int64_t world_size, int64_t num_experts, int64_t local_experts) {
    const auto int32s = [](int64_t count) { return (count + 1) / 2; };
    counts = HANDLE_HEADER_WORDS;
    offsets = counts + local_experts;
    matrix = offsets + int32s(local_experts + 1);
    expert = matrix + int32s(world_size * num_experts);
    row = expert + int32s(pairs);
    ids = row + int32s(pairs);
    total = ids + world_size;
  }
};

inline void put64(int32_t* words, int at, int64_t value) {
  words[at] = static_cast<int32_t>(static_cast<uint64_t>(value) & 0xffffffffu);
  words[at + 1] = static_cast<int32_t>(static_cast<uint64_t>(value) >> 32);
}

inline int64_t get64(const int32_t* words, int at) {
  return static_cast<int64_t>(static_cast<uint32_t>(words[at]) |
                              (static_cast<uint64_t>(static_cast<uint32_t>(words[at + 1])) << 32));
}

}  // namespace moe_a2a
