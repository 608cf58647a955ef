/* Dispatch and combine: what may be written where and when.
 *
 * Every rank runs the same script of calls: BEGIN n publishes the record of the next dispatch, FINISH waits for the records of
 * the oldest dispatch under way and moves its rows, COMBINE + h combines handle h. A synchronous dispatch is BEGIN, FINISH.
 * A handle that the script never combines is dropped.
 *
 * The choices within a call are free: how many rows go to whom, whether a source lets its rows be pulled or pushes them, the
 * same for the owner of a combine, and (EARLY) whether a rank's combine ends early: its weights are unusable and it raises
 * after its own rows have gone out, or its y is unusable and it refuses. Either way it doesn't wait for its owners' cells.
 *
 * Steps are merged where that loses nothing. Stores to one peer that are ordered by a fence are one step (payload and code;
 * clearing, x and the first record): only a reader that doesn't wait for the code could tell. A wait and the reads that it
 * guards are one step: what is waited for stays true, so the step can come as late as the reads alone could; if it doesn't
 * stay true, the rank hangs, which is found as well. The faults of memory order take these steps apart.
 * Rows of a rank for itself don't go through the window and are left out.
 *
 * Tags stand for contents: a row of call n of source s is n * 4 + s; y is the number of the script's step, which differs
 * between two combines of the same handle.
 *
 * FUSED: a dispatch may be a fused call, for all ranks alike (1: every one is, 2: a free choice). Its rows are pushed into the
 * owner's y, and FINISH ends with that. COMBINE begins with the experts: when the rows of all sources are there, results
 * overwrite them in place. A rank that refuses doesn't wait for rows. y is told apart by rows here, as row is. A round is a
 * dispatch in which nobody has rows to move and whose handle is combined all the same: what it may write and when is what a
 * dispatch that is pulled may, so it has no step of its own.
 *
 * Parameters
 *   R ranks (2 or 3), NS slots, A most dispatches begun and not finished (up to NS), NREC record slots, NX slots for x,
 *   V codes (0: never wraps), ROWS most rows from one rank to another (1 or 2), SENDERS ranks that have rows (0, 1, ...),
 *   DPUSH and CPUSH 0 pull, 1 push, 2 either, EARLY: combines may end early,
 *   FUSED 0, 1, 2 as above,
 *   ABANDON: a rank that lets its rows be pulled may abandon a dispatch: it reads the records and not the rows,
 *   FREE_ORDER: with A = 2, a rank may finish the later dispatch first,
 *   START calls made before the script begins, all without rows (so that a wrap is near),
 *   LEN length of all scripts (in calls where A = 1, in steps otherwise), or STEPS and S0, S1, ... for a fixed one
 * Faults
 *   FAULT_ONE_COUNTER         dispatch and combine count together, slot = parity
 *   FAULT_ROWS_FIRST          rows are pushed before the records of the peers are here
 *   FAULT_NO_RECORDS          reused routing: no records at all
 *   FAULT_EARLY_Y             y is written before the records of its dispatch are here
 *   FAULT_SINGLE_Y            one y for all slots
 *   FAULT_SHARED_WORDS        record codes and combine cells are the same words
 *   FAULT_EXPIRED             a handle may be combined when NS newer dispatches have begun
 *   FAULT_OWNER_DROPS         the last rank drops every handle although it hosts rows (the source can only time out)
 *   FAULT_NO_CLEAR            flags aren't cleared at a new lap
 *   FAULT_CLEAR_ONCE          flags are cleared at a slot's first use in a new lap only
 *   FAULT_SLOT_FROM_CODE, FAULT_CODE_ZERO, FAULT_GE   slot, code and comparison at the wrap
 *   FAULT_ROW_FLAG_FIRST, FAULT_X_LATE, FAULT_Y_LATE, FAULT_Z_LATE   payload after its flag or record
 *   FAULT_READ_X_LATE, FAULT_READ_ROWS_LATE, FAULT_READ_Y_LATE   last read of a handle after the record that frees its slot
 *   FAULT_CLEAR_LATE          clearing after the record
 *   FAULT_OWNER_RECORD        fused: rank 0 pushes to an owner when that owner's record is here, whatever the others' say
 *   FAULT_EXPERT_EARLY        fused: an expert is computed before its rows are there
 */
#ifndef R
#define R 2
#endif
#ifndef NS
#define NS 2
#endif
#ifndef A
#define A 1
#endif
#ifndef NREC
#define NREC (2 * A)
#endif
#ifndef NX
#define NX (2 * A)
#endif
#ifndef V
#define V 0
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef DPUSH
#define DPUSH 2
#endif
#ifndef CPUSH
#define CPUSH 2
#endif
#ifndef LEN
#define LEN 4
#endif
#ifndef STEPS
#define STEPS 0
#endif
#ifndef START
#define START 0
#endif
#ifndef SENDERS
#define SENDERS R
#endif
#ifndef FUSED
#define FUSED 0
#endif

/* ------------------------------------------------------------------------------------------------ numbers */

#if V == 0
#define CODE(n) (n)
#else
#ifdef FAULT_CODE_ZERO
#define CODE(n) ((n) % V)
#else
#define CODE(n) (((n) - 1) % V + 1)
#endif
#define LAP(n) ((n) > 0 -> ((n) - 1) / V : 0) /* of what never was: 0 */
#endif
#ifdef FAULT_SLOT_FROM_CODE
#define NUMBER(n) CODE(n)
#else
#define NUMBER(n) (n)
#endif
#define SLOT(n) (NUMBER(n) % NS)
#define RSLOT(n) (NUMBER(n) % NREC)
#define XSLOT(n) (NUMBER(n) % NX)
#ifdef FAULT_SINGLE_Y
#define YSLOT(h) 0
#else
#define YSLOT(h) SLOT(h)
#endif
#ifdef FAULT_GE
#define HERE(word, n) ((word) >= CODE(n))
#else
#define HERE(word, n) ((word) == CODE(n))
#endif
#define REFUSED 128 /* added to the code of a combine cell */

/* What a rank remembers of call n is kept in place n % KEPT until the slot's next use. */
#if defined(FAULT_EXPIRED) || defined(FAULT_READ_Y_LATE) || defined(FAULT_READ_ROWS_LATE)
#define KEPT (2 * NS)
#else
#define KEPT NS
#endif

#define BEGIN 1
#define FINISH 2
#define COMBINE 16
#define TAG(n, source) ((n) * 4 + (source))
#define CAP ((R - 1) * ROWS) /* rows that one rank can receive, or get back in a combine */

/* Calls are addressed in the windows by KEY, a call's number: its dispatch's n. */
#ifdef FAULT_ONE_COUNTER
#define KEY key
#else
#define KEY n
#endif

/* ------------------------------------------------------------------------------------------------ windows */

/* Cell of `writer` in the window of `owner`. */
#define REC(owner, n, writer) (((owner) * NREC + RSLOT(n)) * R + (writer))
#define CELL(owner, h, writer) (((owner) * NS + SLOT(h)) * R + (writer))
#define ROW(owner, n, position) (((owner) * NS + SLOT(n)) * CAP + (position))
#define X(owner, n) ((owner) * NX + XSLOT(n))
#define Y(owner, h) ((owner) * NS + YSLOT(h))
#define Y_ROW(owner, h, position) (((owner) * NS + YSLOT(h)) * CAP + (position))
#if FUSED
#define FUSES(n) ((fusing >> (n)) & 1)
#else
#define FUSES(n) false
#endif

byte rec_code[R * NREC * R];
byte rec_rows[R * NREC * R * R]; /* body: rows for every destination, */
bool rec_push[R * NREC * R];     /* and whether the source pushes them */
byte rec_truth[R * NREC * R];    /* ghost: call of the body */
byte x[R * NX];
byte row[R * NS * CAP];
byte row_flag[R * NS * CAP];
#ifdef FAULT_SHARED_WORDS
#define cell_code rec_code /* same shape: NREC = NS here */
#else
byte cell_code[R * NS * R];
#endif
bool cell_push[R * NS * R];  /* body of the cell: the owner pushes its rows */
byte cell_truth[R * NS * R]; /* ghost: step of the script that wrote the cell */
#if FUSED
byte y[R * NS * CAP];
int fusing; /* set of the fused calls; given, since it is the script's, and mixed kinds are a mismatch */
#else
byte y[R * NS];
#endif
byte z[R * NS * CAP];

byte script[2 * LEN + STEPS];
byte steps;
#ifdef FAULT_NO_RECORDS
byte route[R * R]; /* the reused routing, known to all */
#endif

/* -------------------------------------------------------------------------------------------------- pieces */

/* rows from source to destination in call n, and the source's way, as this rank knows them */
#define COUNT(n, source, destination) count[((n) % KEPT * R + (source)) * R + (destination)]
#define PUSHES(n, source) pushes[(n) % KEPT * R + (source)]

/* p becomes the next rank, from p on, for which there is something to do, or R */
#define SEEK(condition)                                                                                                        \
  do                                                                                                                           \
  :: p < R && !(p != me && (condition)) -> p++                                                                                 \
  :: else -> break                                                                                                             \
  od

/* position, at destination, of the first row of source in call n: final order, smaller sources first */
inline row_position(n_, destination, source) {
  at = 0;
  q = 0;
  do
  :: q < source -> at = at + COUNT(n_, q, destination); q++
  :: else -> break
  od;
  q = 0
}

/* position, in the source's z, of the first row of owner: the source's order, smaller owners first */
inline z_position(h_, source, owner) {
  at = 0;
  q = 0;
  do
  :: q < owner -> at = at + COUNT(h_, source, q); q++
  :: else -> break
  od;
  q = 0
}

/* rows pushed to this rank in call n are where they belong, and whole */
inline check_rows(n_) {
  p = (FUSES(n_) -> R : 0);
  SEEK(PUSHES(n_, p));
  do
  :: p < R ->
     row_position(n_, me, p);
     i = 0;
     do
     :: i < COUNT(n_, p, me) -> assert(row[ROW(me, n_, at + i)] == TAG(n_, p)); i++
     :: else -> break
     od;
     p++;
     SEEK(PUSHES(n_, p))
  :: else -> break
  od;
  p = 0; i = 0; at = 0
}

/* rows that this rank pulls in call n */
inline check_x(n_) {
  p = 0;
  do
  :: p < R ->
     if
     :: p != me && COUNT(n_, p, me) > 0 && !PUSHES(n_, p) -> assert(x[X(p, n_)] == TAG(n_, p))
     :: else
     fi;
     p++
  :: else -> break
  od;
  p = 0
}

/* the owners' rows for this rank's combine of h, made at step s_ of the script */
inline check_y(h_, s_) {
  p = 0;
  do
  :: p < R && (p == me || COUNT(h_, me, p) == 0) -> p++
  :: p < R && p != me && COUNT(h_, me, p) > 0 ->
     assert(cell_truth[CELL(me, h_, p)] == s_);
     if
     :: cell_code[CELL(me, h_, p)] >= REFUSED
     :: else ->
        if
        :: cell_push[CELL(me, h_, p)] ->
           z_position(h_, me, p);
           i = 0;
           do
           :: i < COUNT(h_, me, p) -> assert(z[ROW(me, h_, at + i)] == s_); i++
           :: else -> break
           od;
           i = 0; at = 0
        :: else ->
#if FUSED
           row_position(h_, p, me);
           i = 0;
           do
           :: i < COUNT(h_, me, p) -> assert(y[Y_ROW(p, h_, at + i)] == s_); i++
           :: else -> break
           od;
           i = 0; at = 0
#else
           assert(y[Y(p, h_)] == s_)
#endif
        fi
     fi;
     p++
  :: p == R -> break
  od;
  p = 0
}

/* The flags of this window's slot of call n. Twice: where a combine ended early here, an owner may write its cell of the old
   lap after the first clearing. By the second use of the slot its record of the first one is here, so it has. */
inline clear_lap(n_) {
#if V > 0 && !defined(FAULT_NO_CLEAR)
  if
#ifdef FAULT_CLEAR_ONCE
  :: LAP(n_) != LAP(n_ - NS) ->
#else
  :: LAP(n_) != LAP(n_ - 2 * NS) ->
#endif
     i = 0;
     do
     :: i < R -> cell_code[CELL(me, n_, i)] = 0; i++
     :: else -> break
     od;
     i = 0;
     do
     :: i < CAP -> row_flag[ROW(me, n_, i)] = 0; i++
     :: else -> break
     od;
     i = 0
  :: else
  fi
#else
  skip
#endif
}

#if R == 2
#define ALL_RECORDS(n) (RECORD_OF(0, n) && RECORD_OF(1, n))
#define ALL_CELLS(h) (CELL_OF(0, h) && CELL_OF(1, h))
#else
#define ALL_RECORDS(n) (RECORD_OF(0, n) && RECORD_OF(1, n) && RECORD_OF(2, n))
#define ALL_CELLS(h) (CELL_OF(0, h) && CELL_OF(1, h) && CELL_OF(2, h))
#endif
#define RECORD_OF(p, n) ((p) == me || HERE(rec_code[REC(me, n, p)], n))
#define CELL_OF(p, h)                                                                                                          \
  ((p) == me || COUNT(h, me, p) == 0 || HERE(cell_code[CELL(me, h, p)], h) ||                                                  \
   (cell_code[CELL(me, h, p)] == CODE(h) + REFUSED))

/* ------------------------------------------------------------------------------------------------- dispatch */

inline choose_rows() {
  p = 0;
  do
  :: p < R ->
     COUNT(n, me, p) = 0;
     if
#ifdef FAULT_NO_RECORDS
     :: COUNT(n, me, p) = route[me * R + p]
#else
     :: true
     :: p != me && me < SENDERS -> COUNT(n, me, p) = ROWS
#if ROWS == 2
     :: p != me && me < SENDERS -> COUNT(n, me, p) = 1
#endif
#endif
     fi;
     if
     :: COUNT(n, me, p) > 0 -> push = true
     :: else
     fi;
     p++
  :: else -> break
  od;
  if
  :: FUSES(n) -> push = true
#if DPUSH != 1
  :: push && !FUSES(n) -> push = false
#endif
#if DPUSH != 0
  :: push && !FUSES(n)
#endif
  :: !push && !FUSES(n)
  fi;
  PUSHES(n, me) = push;
  p = 0
}

inline write_record() {
  i = 0;
  do
  :: i < R -> rec_rows[REC(p, KEY, me) * R + i] = COUNT(n, me, i); i++
  :: else -> break
  od;
  i = 0;
  rec_push[REC(p, KEY, me)] = push;
  rec_truth[REC(p, KEY, me)] = n;
  rec_code[REC(p, KEY, me)] = CODE(KEY)
}

inline read_records() {
  p = 0;
  do
  :: p < R ->
#ifdef FAULT_NO_RECORDS
     COUNT(n, p, me) = route[p * R + me];
     PUSHES(n, p) = true;
#else
     if
     :: p != me ->
        assert(rec_truth[REC(me, KEY, p)] == n);
        i = 0;
        do
        :: i < R -> COUNT(n, p, i) = rec_rows[REC(me, KEY, p) * R + i]; i++
        :: else -> break
        od;
        i = 0;
        PUSHES(n, p) = rec_push[REC(me, KEY, p)]
     :: else
     fi;
#endif
     p++
  :: else -> break
  od;
  p = 0
}

/* stores into the row region of p, or its y, in one step a peer */
inline push_rows() {
  do
  :: atomic {
       p < R ->
       row_position(n, p, me);
#ifdef FAULT_ROW_FLAG_FIRST
       i = 0;
       do
       :: i < COUNT(n, me, p) -> row_flag[ROW(p, KEY, at + i)] = CODE(KEY); i++
       :: else -> break
       od
     };
     atomic {
#endif
       i = 0;
       do
       :: i < COUNT(n, me, p) ->
#if FUSED
          if
          :: FUSES(n) -> y[Y_ROW(p, n, at + i)] = TAG(n, me)
          :: else -> row[ROW(p, KEY, at + i)] = TAG(n, me)
          fi;
#else
          row[ROW(p, KEY, at + i)] = TAG(n, me);
#endif
#ifndef FAULT_ROW_FLAG_FIRST
          row_flag[ROW(p, KEY, at + i)] = CODE(KEY);
#endif
          i++
       :: else -> break
       od;
       i = 0;
       at = 0;
       p++;
       SEEK(PUSHES(n, me) && COUNT(n, me, p) > 0);
       if
       :: p == R -> p = 0; break
       :: else
       fi
     }
  :: atomic { p == R -> p = 0; break }
  od
}

/* expected = set of the positions that are pushed to this rank in call n */
inline expect_rows() {
  p = 0;
  SEEK(PUSHES(n, p));
  do
  :: p < R ->
     row_position(n, me, p);
     i = 0;
     do
     :: i < COUNT(n, p, me) -> expected = expected | (1 << (at + i)); i++
     :: else -> break
     od;
     p++;
     SEEK(PUSHES(n, p))
  :: else -> break
  od;
  p = 0; i = 0; at = 0
}

#define ROW_HERE(at) ((expected >> (at)) % 2 == 0 || HERE(row_flag[ROW(me, KEY, at)], KEY))
#if CAP == 1
#define ROWS_HERE ROW_HERE(0)
#elif CAP == 2
#define ROWS_HERE (ROW_HERE(0) && ROW_HERE(1))
#else
#define ROWS_HERE (ROW_HERE(0) && ROW_HERE(1) && ROW_HERE(2) && ROW_HERE(3))
#endif

/* -------------------------------------------------------------------------------------------------- combine */

#if FUSED
/* the experts' results, or the rows of a plain combine: the whole slot */
inline write_y() {
  i = 0;
  do
  :: i < CAP -> y[Y_ROW(me, n, i)] = pc + 1; i++
  :: else -> break
  od;
  i = 0
}

/* the rows of a fused call, as its experts find them */
inline check_fused_rows() {
  p = 0;
  SEEK(true);
  do
  :: p < R ->
     row_position(n, me, p);
     i = 0;
     do
     :: i < COUNT(n, p, me) -> assert(y[Y_ROW(me, n, at + i)] == TAG(n, p)); i++
     :: else -> break
     od;
     p++;
     SEEK(true)
  :: else -> break
  od;
  p = 0; i = 0; at = 0
}
#else
inline write_y() { y[Y(me, KEY)] = pc + 1 }
#endif

inline write_z() {
  z_position(n, p, me);
  i = 0;
  do
  :: i < COUNT(n, p, me) -> z[ROW(p, KEY, at + i)] = pc + 1; i++
  :: else -> break
  od;
  i = 0; at = 0
}

inline write_cell() {
#ifndef FAULT_Z_LATE
  if
  :: push && !refuses -> write_z()
  :: else
  fi;
#endif
  cell_push[CELL(p, KEY, me)] = push;
  cell_truth[CELL(p, KEY, me)] = pc + 1;
  cell_code[CELL(p, KEY, me)] = CODE(KEY) + (refuses -> REFUSED : 0)
}

/* ----------------------------------------------------------------------------------------------------- rank */

proctype Rank(byte me) {
  byte pc;                     /* steps of the script done */
  byte begun, finished;        /* dispatches */
  byte count[KEPT * R * R];
  bool pushes[KEPT * R];
  byte n;                      /* dispatch, or handle of the combine, of this step */
  bool push, early, refuses;   /* this rank's choices in this step */
  byte expected;               /* set of positions of rows that this step waits for */
  byte p, q, i, at;
#ifdef FREE_ORDER
  bool ahead; /* the later one of two dispatches has been finished first */
#endif
#ifdef FAULT_ONE_COUNTER
  byte key;
#endif
#ifdef FAULT_READ_Y_LATE
  byte unread[KEPT]; /* step of the combine whose rows aren't read yet */
#endif

  begun = START;
  finished = START;
next:
  do
  :: atomic {
       pc < steps && script[pc] == BEGIN ->
       begun++;
       n = begun;
#ifdef FAULT_ONE_COUNTER
       key++;
#endif
       /* Handle n - NS is closed. Its rows may have been used where they are, until now. */
#if KEPT == NS && !defined(FAULT_ONE_COUNTER)
       if
       :: n > START + NS -> check_rows(n - NS)
       :: else
       fi;
#endif
       choose_rows();
#ifndef FAULT_CLEAR_LATE
       clear_lap(KEY);
#endif
#ifndef FAULT_X_LATE
       if
       :: !push -> x[X(me, KEY)] = TAG(n, me)
       :: else
       fi;
#endif
       SEEK(true);
#ifdef FAULT_NO_RECORDS
       p = R
#endif
     };
     do
     :: atomic {
          p < R ->
          write_record();
          p++;
          SEEK(true);
          if
          :: p == R -> break
          :: else
          fi
        }
     :: atomic { p == R -> break }
     od;
#ifdef FAULT_X_LATE
     x[X(me, KEY)] = TAG(n, me);
#endif
#ifdef FAULT_CLEAR_LATE
     atomic { clear_lap(KEY) };
#endif
#ifdef FAULT_READ_ROWS_LATE
     atomic {
       if
       :: n > START + NS -> check_rows(n - NS)
       :: else
       fi
     };
#endif
#ifdef FAULT_READ_X_LATE
     atomic {
       if
       :: n > START + 1 -> check_x(n - 1)
       :: else
       fi
     };
#endif
#ifdef FAULT_READ_Y_LATE
     atomic {
       if
       :: n > START + NS && unread[(n - NS) % KEPT] > 0 -> check_y(n - NS, unread[(n - NS) % KEPT]); unread[(n - NS) % KEPT] = 0
       :: else
       fi
     };
#endif
#ifdef FAULT_EARLY_Y
#if FUSED
     atomic { i = 0;
     do
     :: i < CAP -> y[Y_ROW(me, n, i)] = 255; i++
     :: else -> break
     od;
     i = 0 };
#else
     y[Y(me, KEY)] = 255;
#endif
#endif
     atomic { p = 0; n = 0; push = false; pc++ }

  :: atomic {
       pc < steps && script[pc] == FINISH ->
       n = finished + 1;
#ifdef FREE_ORDER
       if
       :: !ahead -> finished++
       :: !ahead && begun == finished + 2 -> n++; ahead = true
       :: ahead -> finished = finished + 2; ahead = false
       fi
#else
       finished++
#endif
     };
#ifdef FAULT_ROWS_FIRST
     atomic { SEEK(PUSHES(n, me) && COUNT(n, me, p) > 0) };
     push_rows();
#endif
#ifdef FAULT_OWNER_RECORD
     /* Rank 0's rows come first wherever they go, so no record is needed to place them. */
     if
     :: atomic { FUSES(n) && me == 0 -> p = 1 };
        do
        :: atomic {
             p < R && RECORD_OF(p, n) ->
             i = 0;
             do
             :: i < COUNT(n, 0, p) -> y[Y_ROW(p, n, i)] = TAG(n, 0); row_flag[ROW(p, KEY, i)] = CODE(KEY); i++
             :: else -> break
             od;
             i = 0;
             p++
           }
        :: atomic { p == R -> p = 0; break }
        od
     :: else
     fi;
#endif
     atomic {
#ifndef FAULT_NO_RECORDS
       ALL_RECORDS(n);
#endif
       read_records();
#ifdef ABANDON
       if
       :: true
       :: !PUSHES(n, me) ->
          do
          :: p < R -> COUNT(n, p, me) = 0; p++
          :: else -> break
          od;
          p = 0
       fi;
#endif
       if
       :: FUSES(n)
       :: else -> expect_rows()
       fi;
       SEEK(PUSHES(n, me) && COUNT(n, me, p) > 0)
     };
#ifdef FAULT_ROWS_FIRST
     atomic { p = 0 };
#else
     push_rows();
#endif
     atomic {
       ROWS_HERE -> /* and now, or much later, they and the peers' x are read */
       check_rows(n);
#ifndef FAULT_READ_X_LATE
       check_x(n);
#endif
       expected = 0; n = 0; pc++
     }

  :: atomic {
       pc < steps && script[pc] > COMBINE ->
       n = script[pc] - COMBINE;
#ifdef FAULT_OWNER_DROPS
       if
       :: me == R - 1 -> n = 0; pc++; goto next
       :: else
       fi;
#endif
       check_rows(n); /* the experts read them in the window */
#ifdef FAULT_ONE_COUNTER
       key++;
#endif
#ifdef EARLY
       if
       :: true
       :: early = true
       :: early = true; refuses = true
       fi;
#endif
#if FUSED
#ifndef FAULT_EXPERT_EARLY
       if
       :: FUSES(n) && !refuses -> expect_rows()
       :: else
       fi
     };
     atomic {
       ROWS_HERE ->
#endif
       if
       :: FUSES(n) && !refuses -> check_fused_rows()
       :: else
       fi;
       expected = 0
     };
     atomic {
       if
       :: FUSES(n) && !refuses -> write_y() /* in place */
       :: else
       fi;
#endif
       SEEK(COUNT(n, p, me) > 0);
       if
       :: p == R || refuses /* no rows to write */
#if CPUSH != 0
       :: p < R && !refuses -> push = true
#endif
#if CPUSH != 1
       :: p < R && !refuses ->
#ifdef FAULT_Y_LATE
          skip
#else
          write_y()
#endif
#endif
       fi
     };
     do /* the owner's half: a cell for every source of rows */
     :: atomic {
          p < R ->
          write_cell();
#ifdef FAULT_Z_LATE
        };
        atomic {
          write_z();
#endif
          p++;
          SEEK(COUNT(n, p, me) > 0);
          if
          :: p == R -> break
          :: else
          fi
        }
     :: atomic { p == R -> break }
     od;
#ifdef FAULT_Y_LATE
     write_y();
#endif
     atomic { /* the source's half */
       early || ALL_CELLS(n) ->
       if
       :: early
#ifdef FAULT_READ_Y_LATE
       :: !early -> unread[n % KEPT] = pc + 1
#else
       :: !early -> check_y(n, pc + 1)
#endif
       fi;
       early = false; refuses = false; push = false; p = 0; n = 0; pc++
     }

  :: atomic { pc == steps -> break }
  od
}

/* --------------------------------------------------------------------------------------------------- script */

#define ADD(step)                                                                                                              \
  script[steps] = step;                                                                                                        \
  steps++

init {
  byte calls, begun, finished, h, closed, i;
  atomic {
#if FUSED == 1
    fusing = ~0;
#elif FUSED == 2
    i = 1;
    do
    :: i <= START + LEN + STEPS ->
       if
       :: true
       :: fusing = fusing | (1 << i)
       fi;
       i++
    :: else -> break
    od;
    i = 0;
#endif
#if STEPS > 0
    ADD(S0);
    ADD(S1);
#if STEPS > 2
    ADD(S2);
#endif
#if STEPS > 3
    ADD(S3);
#endif
#if STEPS > 4
    ADD(S4);
#endif
#if STEPS > 5
    ADD(S5);
#endif
#if STEPS > 6
    ADD(S6);
#endif
#if STEPS > 7
    ADD(S7);
#endif
#if STEPS > 8
    ADD(S8);
#endif
#if STEPS > 9
    ADD(S9);
#endif
#if STEPS > 10
    ADD(S10);
#endif
#if STEPS > 11
    ADD(S11);
#endif
#if STEPS > 12
    ADD(S12);
#endif
#if STEPS > 13
    ADD(S13);
#endif
#if STEPS > 14
    ADD(S14);
#endif
#if STEPS > 15
    ADD(S15);
#endif
#else
    begun = START;
    finished = START;
    do
    :: calls < LEN ->
       calls++;
       h = (begun > NS -> begun - NS + 1 : 1); /* oldest handle that hasn't expired */
       if
#if A == 1
       :: ADD(BEGIN); ADD(FINISH); begun++; finished++
#else
       :: begun - finished < A -> ADD(BEGIN); begun++
       :: finished < begun -> finished++; ADD(FINISH)
#endif
       :: h > START && h <= finished && !((closed >> h) & 1) -> ADD(COMBINE + h); closed = closed | (1 << h)
       :: h + 1 <= finished && !((closed >> (h + 1)) & 1) -> ADD(COMBINE + h + 1); closed = closed | (1 << (h + 1))
#if NS > 2
       :: h + 2 <= finished && !((closed >> (h + 2)) & 1) -> ADD(COMBINE + h + 2); closed = closed | (1 << (h + 2))
#endif
       fi
    :: calls == LEN -> break
    od;
    calls = 0; begun = 0; finished = 0; h = 0; closed = 0;
#endif
#ifdef FAULT_NO_RECORDS
    do
    :: i < R * R ->
       if
       :: true
       :: i / R != i % R -> route[i] = 1
       fi;
       i++
    :: else -> break
    od;
    i = 0;
#endif
    do
    :: i < R -> run Rank(i); i++
    :: i == R -> break
    od;
    i = 0
  }
}
