/* Ends: peers that leave, die or are too slow while others wait for them.
 *
 * Every rank makes CALLS calls, one record round each, and then closes its group: LEFT in its status cell of every peer. With
 * LEAVE_EARLY it may close before. Up to DEATHS processes may end at any step. Up to TIMEOUTS waits may end although nothing
 * is wrong; the slow peer then goes on as a zombie and writes its records late.
 *
 * A waiting rank polls for the records and, while some are missing, looks at its status cells. LEFT and the end of a process
 * count only for peers it still waits for, POISON counts from any. When it finds a peer gone it polls once more: the peer may
 * have done its part between the poll and the look. It raises only if the record of *that* peer is still missing, and goes on
 * waiting otherwise; for POISON or a timeout it raises if any record is missing. A rank that raises first writes POISON to all
 * peers and never touches the windows again.
 *
 * Claims: nobody waits for ever; a peer is reported as gone only when its record is really missing; where nobody leaves early,
 * dies or times out, nobody raises; a call that returns has read what its peers wrote.
 *
 * Parameters: R ranks (2 or 3), CALLS, DEATHS, TIMEOUTS; LEAVE_EARLY.
 * Faults
 *   FAULT_NO_SECOND_POLL  raises as soon as a peer is gone
 *   FAULT_ANY_MISSING     polls once more, but raises if any record is missing, not only that of the peer that is gone
 *   FAULT_LEFT_FIRST      LEFT may be seen before the last records
 *   FAULT_NO_POISON       raises without telling anyone
 *   FAULT_POISON_ONE      tells only a rank that it missed
 *   FAULT_WRITES_ON       a rank that has raised goes on to use its x
 */
#ifndef R
#define R 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif
#define NREC 2
#define NX 2

#define POISON 2
#define LEFT 3

#define REC(owner, n, source) (((owner) * NREC + (n) % NREC) * R + (source))
#define STATUS(owner, writer) ((owner) * R + (writer))
byte code[R * NREC * R];
byte x[R * NX];
byte status[R * R];
bool ended[R];     /* the process is over, as a pidfd tells */
byte deaths, timeouts;
byte wrote[R * R]; /* ghost: last record that [owner] has from [source] */

#define HERE(p) ((p) == me || code[REC(me, n, p)] == n)
#define GONE(p) (status[STATUS(me, p)] == LEFT || ended[p])
#define MISSED(p) ((missing >> (p)) & 1)
#if R == 2
#define ALL_HERE (HERE(0) && HERE(1))
#define POISONED (status[STATUS(me, 0)] == POISON || status[STATUS(me, 1)] == POISON)
#else
#define ALL_HERE (HERE(0) && HERE(1) && HERE(2))
#define POISONED (status[STATUS(me, 0)] == POISON || status[STATUS(me, 1)] == POISON || status[STATUS(me, 2)] == POISON)
#endif

#if DEATHS > 0
#define MAY_DIE :: atomic { deaths < DEATHS -> deaths++; goto dead }
#else
#define MAY_DIE
#endif

inline poll() {
  missing = 0;
  p = 0;
  do
  :: p < R ->
     if
     :: HERE(p)
     :: else -> missing = missing | (1 << p)
     fi;
     p++
  :: else -> break
  od;
  p = 0
}

proctype Rank(byte me) {
  byte n, p, missing, who;
  do
  :: atomic {
       n < CALLS ->
       n++;
       x[me * NX + n % NX] = n;
#ifdef FAULT_LEFT_FIRST
       do
       :: p < R && n == CALLS -> status[STATUS(p, me)] = LEFT; p++
       :: else -> break
       od;
       p = 0
#endif
     };
     do /* the records, one peer after the other */
     :: atomic { p < R && p != me -> code[REC(p, n, me)] = n; wrote[STATUS(p, me)] = n; p++ }
     :: atomic { p == me -> p++ }
     :: atomic { p == R -> p = 0; break }
     MAY_DIE
     od;
     do /* wait */
     :: atomic {
          poll();
          if
          :: missing == 0 -> break
          :: else
          fi
        };
        if /* look, where there is something to see */
        :: atomic { ALL_HERE -> missing = 0; break }
        :: atomic { MISSED(0) && GONE(0) -> who = 0 }
        :: atomic { MISSED(1) && GONE(1) -> who = 1 }
#if R > 2
        :: atomic { MISSED(2) && GONE(2) -> who = 2 }
#endif
        :: atomic { POISONED -> who = R }
#if TIMEOUTS > 0
        :: atomic { timeouts < TIMEOUTS -> timeouts++; who = R }
#endif
        MAY_DIE
        fi;
        atomic {
#ifndef FAULT_NO_SECOND_POLL
          poll();
#endif
          if
          :: missing == 0 -> who = 0; break
#ifndef FAULT_ANY_MISSING
          :: who < R && missing != 0 && !MISSED(who) -> who = 0
#endif
          :: else -> assert(who == R || wrote[STATUS(me, who)] < n); who = 0; goto raise
          fi
        }
     od;
     do /* all here: the rows are pulled, perhaps much later and although a peer has raised or died meanwhile */
     :: atomic { p < R -> assert(p == me || x[p * NX + n % NX] == n); p++ }
     :: atomic { p == R -> p = 0; break }
     MAY_DIE
     od
#ifdef LEAVE_EARLY
  :: n < CALLS -> break
#endif
  :: n == CALLS -> break
  od;
  do
  :: atomic { p < R -> status[STATUS(p, me)] = LEFT; p++ }
  :: atomic { p == R -> goto over }
  MAY_DIE
  od;
raise:
#if DEATHS == 0 && TIMEOUTS == 0 && !defined(LEAVE_EARLY)
  assert(false);
#endif
#ifdef FAULT_POISON_ONE
  status[STATUS((MISSED(0) -> 0 : (MISSED(1) -> 1 : 2)), me)] = POISON;
#elif !defined(FAULT_NO_POISON)
  do
  :: atomic { p < R -> status[STATUS(p, me)] = POISON; p++ }
  :: atomic { p == R -> break }
  MAY_DIE
  od;
#endif
#ifdef FAULT_WRITES_ON
  x[me * NX] = 99;
  x[me * NX + 1] = 99;
#endif
  goto over;
dead:
  ended[me] = true;
over:
  atomic { n = 0; p = 0; missing = 0 }
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
