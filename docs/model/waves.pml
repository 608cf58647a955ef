/* Waves: a call whose rows don't fit the windows moves them in parts.
 *
 * Wave w covers the final rows [w CAP, (w + 1) CAP) of each destination; there is one region of CAP rows per slot. Codes are
 * those of the call, so a row flag or a cell doesn't say which wave it belongs to.
 *
 * Push dispatch, per wave: send own rows; wait for the rows of the wave and copy them out; then, unless it is the last wave,
 * ZERO their flags and afterwards acknowledge to every sender. An acknowledgement is a cell {code(n), mark}: w + 1 waves are
 * out. Its first mark is written before its code, later ones just replace the mark. Rows of wave w > 0 are written only after
 * the destination's mark is at least w.
 *
 * Pull combine, per wave: the owner waits until every source with rows in its wave w - 1 has acknowledged it, writes the rows
 * of wave w into y and says so: in wave 0 by the combine cell, to all its sources; later by a mark w + 1, to those with rows
 * in the wave. A source waits for that, copies, and acknowledges with a mark w + 1 of its own. The three kinds of marks have
 * cells of their own.
 *
 * A rank whose combine ends early (EARLY: unusable weights; unusable y, then it refuses; a refusal from an owner) acknowledges
 * all waves to all owners of its rows at once, goes on giving its own rows, and raises only then. A dispatch that is abandoned
 * (ABANDON: its records are read, its rows are not received) is acknowledged like that, too. Others wait for these marks.
 *
 * All ranks run the same number of waves in a call, the most that any destination needs.
 *
 * The order of calls is fixed: a rank begins the next dispatch when fewer than A are under way and fewer than OPEN handles are
 * open; else it finishes the oldest, else it combines the oldest. Rows for each destination are chosen freely, call by call.
 *
 * Steps are merged as in exchange.pml. A cell is looked at in one step: a reader that takes the code first and the mark
 * afterwards sees the same, since marks only grow under one code.
 *
 * FUSED: all calls are fused, so rows come in waves through y, where the combine's rows stand afterwards.
 *
 * Parameters
 *   R ranks (2 or 3), NS slots, A dispatches begun and not finished, OPEN handles (up to NS), V codes (0: never wraps),
 *   CAP rows of a window (1 or 2), MOST rows from a rank to another, TARGETS ranks that receive rows (0, 1, ...),
 *   CALLS, START calls made before, NO_COMBINE: handles are dropped, ZERO_LAST: the last wave is treated like the others,
 *   EARLY: combines may end early, ABANDON: a rank that sends nothing may abandon a dispatch,
 *   ONE_ASYNC: only rank 0 has more than one dispatch under way, the others are synchronous
 * Faults
 *   FAULT_NO_ACK             rows of the next wave don't wait for the acknowledgement
 *   FAULT_NO_COMBINE_ACK     y of the next wave doesn't wait for the acknowledgements
 *   FAULT_ACK_BEFORE_COPY    acknowledged before the rows are copied out
 *   FAULT_ACK_BEFORE_ZERO    acknowledged before the flags are zeroed
 *   FAULT_NO_ZERO            flags aren't zeroed between waves
 *   FAULT_MARK_ALONE         marks are compared, their code isn't looked at
 *   FAULT_CODE_FIRST         the code of a cell is written before its first mark
 *   FAULT_SHARED_ACK         one acknowledgement cell for dispatch and combine
 *   FAULT_SEND_ALL           a rank sends all its waves before it receives
 *   FAULT_OWN_WAVES          a rank stops after as many waves as it receives
 *   FAULT_EARLY_LEAVES       a rank whose combine ends early doesn't acknowledge
 *   FAULT_ABANDON_SILENT     a dispatch is abandoned without acknowledging
 *   FAULT_LATER_FIRST        with ONE_ASYNC, rank 0 may finish the later of two dispatches first
 *   FAULT_NO_LAP_CLEAR, FAULT_CLEAR_ONCE   at a new lap, cells and flags aren't cleared; or at a slot's first use only
 */
#ifndef R
#define R 2
#endif
#ifndef NS
#define NS 1
#endif
#ifndef A
#define A 1
#endif
#define NREC (2 * A)
#ifndef OPEN
#define OPEN 1
#endif
#ifndef V
#define V 0
#endif
#ifndef CAP
#define CAP 1
#endif
#ifndef MOST
#define MOST 2
#endif
#ifndef TARGETS
#define TARGETS R
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef START
#define START 0
#endif

#if V == 0
#define CODE(n) (n)
#else
#define CODE(n) (((n) - 1) % V + 1)
#define LAP(n) ((n) > 0 -> ((n) - 1) / V : 0)
#endif
#define REFUSED 128 /* added to the code of a combine cell */
#define SLOT(n) ((n) % NS)
#define KEPT (NS + A + 1) /* calls whose counts somebody may still look at */
#define TAG(n, w, source) (((n) * 4 + (w)) * 4 + (source))

/* Cell of `writer` in the window of `owner`; position in a region. */
#define CELL(owner, n, writer) (((owner) * NS + SLOT(n)) * R + (writer))
#define AT(owner, n, position) (((owner) * NS + SLOT(n)) * CAP + (position))

byte rec[R * NREC * R];           /* codes of the records */
byte rows[KEPT * R * R];          /* their bodies: rows [source][destination]; the same for all peers, so kept once */
#ifdef FUSED
#define row y
#else
byte row[R * NS * CAP];           /* push: rows and their flags */
#endif
byte flag[R * NS * CAP];
byte y[R * NS * CAP];             /* pull: rows of a combine */
byte ack_code[R * NS * R], ack_mark[R * NS * R];     /* dispatch: destination to sender */
byte cell_code[R * NS * R];                          /* combine: owner to source, wave 0 */
byte ready_code[R * NS * R], ready_mark[R * NS * R]; /* combine: owner to source, later waves */
#ifdef FAULT_SHARED_ACK
#define back_code ack_code
#define back_mark ack_mark
#else
byte back_code[R * NS * R], back_mark[R * NS * R];   /* combine: source to owner */
#endif

#define COUNT(n, s, d) rows[(((n) % KEPT) * R + (s)) * R + (d)]
#define FIRST(n, s, d) (((s) > 0 -> COUNT(n, 0, d) : 0) + ((s) > 1 -> COUNT(n, 1, d) : 0)) /* final row of s's first one */
#if R == 2
#define TOTAL(n, d) (COUNT(n, 0, d) + COUNT(n, 1, d))
#else
#define TOTAL(n, d) (COUNT(n, 0, d) + COUNT(n, 1, d) + COUNT(n, 2, d))
#endif
#define WAVES(n, d) ((TOTAL(n, d) + CAP - 1) / CAP)
/* source s has rows at d in wave w */
#define HAS(n, s, d, w)                                                                                                        \
  (COUNT(n, s, d) > 0 && FIRST(n, s, d) < ((w) + 1) * CAP && FIRST(n, s, d) + COUNT(n, s, d) > (w) * CAP)
#define OPENS(n, s, d, w) (FIRST(n, s, d) / CAP == (w)) /* w is the first such wave */
/* row at position is from s in wave w */
#define IS_FROM(n, s, d, w, position)                                                                                          \
  ((w) * CAP + (position) >= FIRST(n, s, d) && (w) * CAP + (position) < FIRST(n, s, d) + COUNT(n, s, d))

#ifdef FAULT_MARK_ALONE
#define MARKED(name, cell, n, mark) (name##_mark[cell] >= (mark))
#else
#define MARKED(name, cell, n, mark) (name##_code[cell] == CODE(n) && name##_mark[cell] >= (mark))
#endif

#ifdef FAULT_NO_ACK
#define MAY_SEND(w) true
#else
#define MAY_SEND(w) ((w) == 0 || MARKED(ack, CELL(me, n, p), n, w))
#endif
#ifdef FAULT_NO_COMBINE_ACK
#define MAY_OVERWRITE true
#else
#define MAY_OVERWRITE (w == 0 || ALL_COPIED)
#endif

#define REFUSAL(p) ((p) != me && COUNT(n, me, p) > 0 && cell_code[CELL(me, n, p)] == CODE(n) + REFUSED)
#define CELL_HERE(p) ((p) == me || COUNT(n, me, p) == 0 || cell_code[CELL(me, n, p)] == CODE(n) || REFUSAL(p))
#define FLAG_HERE(j) (w * CAP + (j) >= TOTAL(n, me) || flag[AT(me, n, j)] == CODE(n))
#if CAP == 1
#define WAVE_HERE FLAG_HERE(0)
#else
#define WAVE_HERE (FLAG_HERE(0) && FLAG_HERE(1))
#endif

#define RECORD_OF(p) ((p) == me || rec[((me) * NREC + n % NREC) * R + (p)] == CODE(n))
#define COPIED(p) ((p) == me || !HAS(n, p, me, w - 1) || MARKED(back, CELL(me, n, p), n, w))
#if R == 2
#define ALL_RECORDS (RECORD_OF(0) && RECORD_OF(1))
#define ALL_COPIED (COPIED(0) && COPIED(1))
#define ALL_CELLS (CELL_HERE(0) && CELL_HERE(1))
#define ANY_REFUSAL (REFUSAL(0) || REFUSAL(1))
#else
#define ALL_RECORDS (RECORD_OF(0) && RECORD_OF(1) && RECORD_OF(2))
#define ALL_COPIED (COPIED(0) && COPIED(1) && COPIED(2))
#define ALL_CELLS (CELL_HERE(0) && CELL_HERE(1) && CELL_HERE(2))
#define ANY_REFUSAL (REFUSAL(0) || REFUSAL(1) || REFUSAL(2))
#endif

/* p becomes the next peer, from p on, for which the condition holds, or R */
#define SEEK(condition)                                                                                                        \
  do                                                                                                                           \
  :: p < R && !(p != me && (condition)) -> p++                                                                                 \
  :: else -> break                                                                                                             \
  od

#ifdef FAULT_CODE_FIRST
#define FIRST_HALF(name, cell, mark) name##_code[cell] = CODE(n)
#define SECOND_HALF(name, cell, mark) name##_mark[cell] = mark
#else
#define FIRST_HALF(name, cell, mark) name##_mark[cell] = mark
#define SECOND_HALF(name, cell, mark) name##_code[cell] = CODE(n)
#endif
/* the mark for every peer of the condition; two stores where it is the first one of the call */
#define MARK_ALL(name, mark, condition, first)                                                                                 \
  atomic { SEEK(condition) };                                                                                                  \
  do                                                                                                                           \
  :: atomic { p < R && !(first) -> name##_mark[CELL(p, n, me)] = mark; p++; SEEK(condition) }                                  \
  :: atomic { p < R && (first) -> FIRST_HALF(name, CELL(p, n, me), mark) };                                                    \
     atomic { SECOND_HALF(name, CELL(p, n, me), mark); p++; SEEK(condition) }                                                  \
  :: atomic { p == R -> p = 0; break }                                                                                         \
  od

#ifdef FAULT_EARLY_LEAVES
#define RELEASE skip
#else
#define RELEASE MARK_ALL(back, waves, COUNT(n, me, p) > 0, true)
#endif

inline clear_lap() {
#if V > 0 && !defined(FAULT_NO_LAP_CLEAR)
  if
#ifdef FAULT_CLEAR_ONCE
  :: LAP(n) != LAP(n - NS) ->
#else
  :: LAP(n) != LAP(n - 2 * NS) ->
#endif
     do
     :: j < R ->
        ack_code[CELL(me, n, j)] = 0;
        cell_code[CELL(me, n, j)] = 0;
        ready_code[CELL(me, n, j)] = 0;
        back_code[CELL(me, n, j)] = 0;
        j++
     :: else -> break
     od;
     j = 0;
     do
     :: j < CAP -> flag[AT(me, n, j)] = 0; j++
     :: else -> break
     od;
     j = 0
  :: else
  fi
#else
  skip
#endif
}

inline most_waves() {
  p = 0;
  do
  :: p < R ->
     if
     :: WAVES(n, p) > waves -> waves = WAVES(n, p)
     :: else
     fi;
     p++
  :: else -> break
  od;
#ifdef FAULT_OWN_WAVES
  waves = WAVES(n, me);
#endif
  p = 0
}

/* own rows of wave w to all destinations */
inline send(w_) {
  atomic { SEEK(HAS(n, me, p, w_)) };
  do
  :: atomic {
       p < R && MAY_SEND(w_) ->
       do
       :: j < CAP ->
          if
          :: IS_FROM(n, me, p, w_, j) -> row[AT(p, n, j)] = TAG(n, w_, me); flag[AT(p, n, j)] = CODE(n)
          :: else
          fi;
          j++
       :: else -> break
       od;
       j = 0;
       p++;
       SEEK(HAS(n, me, p, w_))
     }
  :: atomic { p == R -> p = 0; break }
  od
}

inline check_wave() {
  do
  :: p < R ->
     j = 0;
     do
     :: j < CAP && IS_FROM(n, p, me, w, j) -> assert(row[AT(me, n, j)] == TAG(n, w, p)); j++
     :: j < CAP && !IS_FROM(n, p, me, w, j) -> j++
     :: j == CAP -> break
     od;
     p++
  :: else -> break
  od;
  p = 0; j = 0
}

inline zero_flags() {
#ifdef FAULT_NO_ZERO
  skip
#else
  do
  :: j < CAP -> flag[AT(me, n, j)] = 0; j++
  :: else -> break
  od;
  j = 0
#endif
}

#ifdef ZERO_LAST
#define GOES_ON true
#else
#define GOES_ON (w + 1 < waves)
#endif
#ifdef ONE_ASYNC
#define LOOK_AHEAD (me == 0 -> A : 1)
#else
#define LOOK_AHEAD A
#endif
#define MAY_BEGIN (begun < START + CALLS && begun - finished < LOOK_AHEAD && begun - combined < OPEN)

proctype Rank(byte me) {
  byte begun, finished, combined, n, w, waves, p, j;
  bool early, refuses;
  bool abandons;
#ifdef FAULT_SEND_ALL
  byte ahead;
#endif
#ifdef FAULT_LATER_FIRST
  bool later_done;
#endif
  begun = START;
  finished = START;
  combined = START;
  do
  :: atomic { /* begin */
       MAY_BEGIN ->
       begun++;
       n = begun;
       do
       :: p < R ->
          COUNT(n, me, p) = 0;
          do
          :: p != me && p < TARGETS && COUNT(n, me, p) < MOST -> COUNT(n, me, p) = COUNT(n, me, p) + 1
          :: break
          od;
          p++
       :: else -> break
       od;
       p = 0;
       clear_lap();
       SEEK(true)
     };
     do
     :: atomic { p < R -> rec[(p * NREC + n % NREC) * R + me] = CODE(n); p++; SEEK(true) }
     :: atomic { p == R -> p = 0; n = 0; break }
     od

  :: atomic { /* finish */
       finished < begun && !MAY_BEGIN ->
       n = finished + 1;
#ifdef FAULT_LATER_FIRST
       if
       :: !later_done -> finished++
       :: !later_done && begun == finished + 2 -> n++; later_done = true
       :: later_done -> finished = finished + 2; later_done = false
       fi
#else
       finished++
#endif
     };
     atomic {
       ALL_RECORDS ->
       most_waves()
     };
#ifdef ABANDON
     if
     :: abandons = false
     :: atomic { COUNT(n, me, 0) + COUNT(n, me, 1) + COUNT(n, me, R - 1) == 0 -> abandons = true };
#ifndef FAULT_ABANDON_SILENT
        MARK_ALL(ack, waves, COUNT(n, p, me) > 0, true)
#endif
     fi;
#endif
     do
     :: w < waves && !abandons ->
#ifdef FAULT_SEND_ALL
        do
        :: atomic { w == 0 && ahead < waves };
           send(ahead);
           ahead++
        :: atomic { w > 0 || ahead == waves -> break }
        od;
#else
        send(w);
#endif
        if
        :: w < WAVES(n, me) ->
           atomic {
             WAVE_HERE;
#ifndef FAULT_ACK_BEFORE_COPY
             check_wave()
#endif
           };
           if
           :: GOES_ON ->
#ifndef FAULT_ACK_BEFORE_ZERO
              atomic { zero_flags() };
#endif
              MARK_ALL(ack, w + 1, COUNT(n, p, me) > 0, w == 0);
#ifdef FAULT_ACK_BEFORE_ZERO
              atomic { zero_flags() }
#endif
           :: else
           fi;
#ifdef FAULT_ACK_BEFORE_COPY
           atomic { check_wave() }
#endif
        :: else
        fi;
        w++
     :: w == waves || abandons -> break
     od;
     atomic {
       w = 0; waves = 0; n = 0; abandons = false;
#ifdef FAULT_SEND_ALL
       ahead = 0;
#endif
#ifdef NO_COMBINE
       combined++
#endif
     }

  :: atomic { /* combine */
       combined < finished && finished == begun && !MAY_BEGIN ->
       combined++;
       n = combined;
#ifdef EARLY
       if
       :: true
       :: early = true
       :: early = true; refuses = true
       fi;
#endif
       most_waves()
     };
     if
     :: refuses ->
        atomic { SEEK(COUNT(n, p, me) > 0) };
        do
        :: atomic { p < R -> cell_code[CELL(p, n, me)] = CODE(n) + REFUSED; p++; SEEK(COUNT(n, p, me) > 0) }
        :: atomic { p == R -> p = 0; break }
        od
     :: else
     fi;
     if
     :: early -> RELEASE
     :: else
     fi;
     do
     :: w < waves ->
        if
        :: w < WAVES(n, me) && !refuses -> /* owner */
           atomic {
             MAY_OVERWRITE ->
             do
             :: j < CAP -> y[AT(me, n, j)] = TAG(n, w, me); j++
             :: else -> break
             od;
             j = 0
           };
           if
           :: w == 0 ->
              atomic { SEEK(COUNT(n, p, me) > 0) };
              do
              :: atomic { p < R -> cell_code[CELL(p, n, me)] = CODE(n); p++; SEEK(COUNT(n, p, me) > 0) }
              :: atomic { p == R -> p = 0; break }
              od
           :: else -> MARK_ALL(ready, w + 1, HAS(n, p, me, w), w == 1 || OPENS(n, p, me, w))
           fi
        :: else
        fi;
        if
        :: w == 0 && !early -> /* source */
           if
           :: atomic { ALL_CELLS && !ANY_REFUSAL }
           :: atomic { ALL_CELLS && ANY_REFUSAL -> early = true };
              RELEASE
           fi
        :: else
        fi;
        atomic {
          p = (early -> R : 0);
          SEEK(HAS(n, me, p, w))
        };
        do
        :: atomic {
             p < R && (w == 0 || MARKED(ready, CELL(me, n, p), n, w + 1)) ->
             do
             :: j < CAP ->
                assert(!IS_FROM(n, me, p, w, j) || y[AT(p, n, j)] == TAG(n, w, p));
                j++
             :: else -> break
             od;
             j = 0
           };
           if
           :: atomic { OPENS(n, me, p, w) -> FIRST_HALF(back, CELL(p, n, me), w + 1) };
              atomic { SECOND_HALF(back, CELL(p, n, me), w + 1) }
           :: atomic { !OPENS(n, me, p, w) -> back_mark[CELL(p, n, me)] = w + 1 }
           fi;
           atomic { p++; SEEK(HAS(n, me, p, w)) }
        :: atomic { p == R -> p = 0; break }
        od;
        w++
     :: else -> break
     od;
     atomic { w = 0; waves = 0; n = 0; early = false; refuses = false }

  :: atomic { combined == START + CALLS -> break }
  od
}

init {
  byte i;
  atomic {
    do
    :: i < R -> run Rank(i); i++
    :: i == R -> break
    od
  }
}
