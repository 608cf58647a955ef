// Phase 1, counts: every rank tells every rank, in one record, how many rows it sends to each expert, zeros included.
//
// The exchange is also what makes reuse of the window safe: record n of a peer says that it reads nothing of call n - NS any
// more. So it goes to every peer, always, and a call goes on only when the records of all peers are there.
//
// Example, R = 2, E = 4, rank 0 has topk_idx {{1, 3}} in call 5: it writes {COUNTS, n = 5, T = 1, ...} and counts {0, 1, 0, 1}
// into record [5 mod 2][0] of rank 1's window, then code(5) beside it.
#pragma once

#include <cstdint>
#include <string>

#include "flag.h"
#include "layout.h"

namespace moe_a2a {

// What a rank says about its call; the words are those of a record.
struct CallHeader {
  int32_t kind;
  int32_t reason;
  int32_t generation;
  uint64_t epoch;
  int32_t mode;
  int32_t quant;
  int64_t pad_to;
  int32_t align;
  int64_t tokens;
  int64_t hidden;
  int32_t dtype;
  int32_t weight_dtype;
  int64_t top_k;
  int64_t tag;
  int64_t x_offset;
  int64_t x_stride;
  int32_t flag_rows;
  int64_t routing;
  uint64_t read;
  int32_t async;
  int32_t gradients;
  int64_t ids;
};

// The most whole UTF-8 characters of `text` that fit into `bytes`.
std::string clip_text(const std::string& text, int64_t bytes);
// Text that another process wrote: what isn't UTF-8 becomes '?'.
std::string readable_text(const char* text, int64_t bytes);

// Writes the record of `source` for call `epoch` into the window at `window`: body first, then the code.
// payload: int32 counts[E] (nothing where a routing is used again), or the text of an abort.
void write_record(const Layout& layout, char* window, int64_t source, uint64_t epoch, const CallHeader& header,
                  const void* payload, int64_t payload_bytes);

// True once the record of `source` for `epoch` is whole.
bool record_here(const Layout& layout, const char* window, int64_t source, uint64_t epoch);

CallHeader read_record(const Layout& layout, const char* window, int64_t source, uint64_t epoch);
// Copies the counts [E] out.
void read_counts(const Layout& layout, const char* window, int64_t source, uint64_t epoch, int32_t* counts);
std::string record_text(const Layout& layout, const char* window, int64_t source, uint64_t epoch);

// Status cells: each rank tells each peer, outside of any call, that it is well, gone, or that the group is lost.
void write_status(const Layout& layout, char* window, int64_t source, status::Status state, int32_t reason, int64_t who,
                  uint64_t epoch, phase::Phase where);
struct StatusRead {
  int32_t state;  // 0 when never written
  int32_t reason;
  int64_t who;
  uint64_t epoch;
  int32_t phase;
};
StatusRead read_status(const Layout& layout, const char* window, int64_t source);

// The call counter lives in the rank's own window: reads n, writes n + 1 back and returns it. Every way out of a call has been
// through here once.
uint64_t advance_counter(const Layout& layout, char* window);
void write_verdict(const Layout& layout, char* window, int32_t verdict);

// What a rank is doing; written by itself into its own window, read by peers for reports only.
void write_progress(const Layout& layout, char* window, phase::Phase where);
struct ProgressRead {
  uint64_t epoch;
  int32_t phase;
  int32_t verdict;
};
ProgressRead read_progress(const Layout& layout, const char* window);

}  // namespace moe_a2a
