// Hooks for the tests of the protocol; in a product build they are nothing.
//
// With MOE_A2A_TEST_HOOKS defined, a test can drop a rule of the protocol (to show that a test notices) and can be called at
// named points of a call (to put delays there).
#pragma once

namespace moe_a2a {

// What can be dropped. docs/protocol.md says what each rule is for.
enum class Rule : int {
  NONE,
  RECORD_SLOTS,               // NREC records a source, not one
  SLOT_BY_DISPATCH,           // slots follow dispatches, not calls of both kinds
  ZERO_RECORDS,               // a rank without rows for a peer tells it so
  RECORDS_BEFORE_ROWS,        // rows are pushed only when the records of all peers are there
  REUSE_HAS_RECORDS,          // a routing that is used again has its round of records, too
  RECORDS_BEFORE_Y,           // y is written only when the records of its call are there
  Y_SLOTS,                    // one y a handle that may be open
  OWN_WORDS_FOR_CELLS,        // records and combine cells are different words
  ONE_COMBINE,                // a handle is combined once
  SOURCE_SLOTS,               // x isn't written while peers may read it
  CLEAR_IN_A_NEW_LAP,         // codes of the lap before are cleared
  CLEAR_TWICE,                // at the first and at the second use of a slot
  CLEAR_BEFORE_RECORD,        // before the record that allows to write the slot
  SLOT_FROM_FULL_EPOCH,       // slots follow n, not its code
  CODE_IS_NEVER_ZERO,         // 0 is "never written"
  CODES_COMPARE_EQUAL,        // ==, not >=
  ABORT_TO_ALL,               // every peer hears of an abort
  ABORT_INSTEAD_OF_RECORD,    // and nothing else
  RECORDS_ARE_READ,           // before a rank publishes n it has read all records of n - NS
  PAYLOAD_BEFORE_RECORD_CODE,
  PAYLOAD_BEFORE_ROW_FLAG,
  PAYLOAD_BEFORE_CELL_CODE,
  PAYLOAD_BEFORE_LINE_CODE,
  FENCE_AFTER_STREAMING,      // stores that bypass the cache are fenced before the code
  WAVE_IS_READ,               // the next wave waits until this one was read
  WAVE_IS_CLEARED,            // flags of a wave are cleared before the next one
  CLEAR_BEFORE_WAVE_READ,     // and before the sender hears that it was read
  WAVE_MARK_HAS_CODE,         // a watermark counts only with the code of its call
  MARK_BEFORE_WAVE_CODE,      // and is written before it
  RECORDS_ARE_WHOLE,          // in lines: a short record has all lines of a long one
  EXPERT_HAS_ALL_ROWS,        // a fused call computes an expert only when the rows of all sources are there
  LOST_PEER_IS_MISSING,       // a peer that left or ended is a loss only while this rank still misses something of it
};

#ifdef MOE_A2A_TEST_HOOKS
bool dropped(Rule rule);
void at_point(const char* name);
#else
constexpr bool dropped(Rule) { return false; }
inline void at_point(const char*) {}
#endif

}  // namespace moe_a2a
