// Dispatch by push: with the send-count matrix known, the sender knows the final place of every row and writes it there, into the
// owner's window; then the code of the call beside it. A flag stands for a group of rows: of `flag_rows` rows of one (source,
// expert), or of all of them when flag_rows is 0; it is the flag of the group's last row. In the line format each line of a row
// carries the code itself.
//
// Example: rank 1 sends 3 rows to an expert whose owner has 2 rows of rank 0 before them, flag_rows = 2, call 7: rows 2, 3, 4 of
// the owner's slot are written, flags 3 and 4 become 7.
#pragma once

#include <cstdint>

#include "dispatch.h"
#include "layout.h"
#include "rows.h"

namespace moe_a2a {

// A run of rows in a window's row slot, and its flags.
struct Landing {
  char* rows;
  char* flags;       // null in the line format
  int64_t stride;
  int64_t flag_stride;
  int64_t count;
  int64_t flag_rows;
  uint64_t code;
};

// Writes the rows of list entries [first, first + count) of `from`. Returns the payload bytes written.
int64_t push_rows(const RowKernels& kernels, const Layout& layout, const Source& from, int64_t first, const Wire& wire,
                  bool streaming, const Landing& to);

// Are all rows of the run there?
bool rows_here(const Layout& layout, const Landing& at, const Wire& wire);

// Copies the run to rows [row, row + count) of the output. Returns the payload bytes copied.
int64_t take_rows(const RowKernels& kernels, const Layout& layout, const Landing& at, const Wire& wire, bool streaming,
                  int64_t row, const Received& out);

// Takes the codes of the run away, so that a later wave isn't mistaken for this one.
void clear_rows(const Layout& layout, const Landing& at, const Wire& wire);

}  // namespace moe_a2a
