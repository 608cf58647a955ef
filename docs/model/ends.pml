/* Ends: peers that leave, die or are too slow while others wait for them.
 *
 * Every rank makes CALLS calls, one record round each, and then closes its group: LEFT in its status cell of every peer. With
 * LEAVE_EARLY it may close before. With DIE it may die at any step. With TIMEOUT a wait may end at any time; a rank that is
 * only slow then goes on as a zombie and writes its records late.
 *
 * A waiting rank polls for the record and, when it isn't here, looks at its status cells. LEFT and the end of a process count
 * only for the peer it waits for, POISON counts from any. When it finds one it polls once more before it raises, since the
 * peer may have done its part between the poll and the look. A rank that raises for any such reason first writes POISON to
 * all peers and never touches the windows again. Closing a group that hasn't raised writes LEFT.
 *
 * Claims: nobody waits for ever; a peer is reported as gone only when its record is really missing; a call that returns has
 * read what its peers wrote.
 *
 * Parameters: R ranks, CALLS; LEAVE_EARLY, DIE, TIMEOUT.
 * Faults
 *   FAULT_NO_SECOND_POLL  raises as soon as the peer is gone
 *   FAULT_LEFT_FIRST      LEFT is written before the last record
 *   FAULT_NO_POISON       raises without telling anyone
 *   FAULT_POISON_ONE      tells only one peer
 *   FAULT_POISON_AWAITED  POISON counts only from the peer that is waited for, and LEFT from nobody
 *   FAULT_WRITES_ON       a rank that has raised reuses its x for the next group
 */
#ifndef R
#define R 2
#endif
#ifndef CALLS
#define CALLS 2
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
bool ended[R]; /* the process is over, as a pidfd tells */
byte wrote[R * R]; /* ghost: last record that [source] wrote for [owner] */

#define HERE(p) (code[REC(me, n, p)] == n)
#define GONE(p) (status[STATUS(me, p)] == LEFT || ended[p])
#define POISONED_BY(p) (status[STATUS(me, p)] == POISON)
#ifdef FAULT_POISON_AWAITED
#define POISONED POISONED_BY(p)
#elif R == 2
#define POISONED (POISONED_BY(0) || POISONED_BY(1))
#else
#define POISONED (POISONED_BY(0) || POISONED_BY(1) || POISONED_BY(2))
#endif

#ifdef DIE
#define MAY_DIE :: atomic { !ended[0] && !ended[R - 1] -> goto dead } /* one death of these is enough */
#else
#define MAY_DIE
#endif
#ifdef TIMEOUT
#define MAY_TIME_OUT :: atomic { !HERE(p) -> goto raise }
#else
#define MAY_TIME_OUT
#endif

proctype Rank(byte me) {
  byte n, p;
  do
  :: atomic { n < CALLS -> n++; x[me * NX + n % NX] = n };
     do /* the records, one peer after the other */
     :: atomic { p < R && p != me -> code[REC(p, n, me)] = n; wrote[STATUS(p, me)] = n; p++ }
     :: atomic { p == me -> p++ }
     :: atomic { p == R -> p = 0; break }
     MAY_DIE
     od;
     do /* wait; in order of ranks, which is as good as any, for a step here may come late */
     :: atomic { p < R && p != me && HERE(p) -> p++ }
     :: atomic { p < R && p != me && !HERE(p) }; /* not here, a look at the status cells follows */
        if
        :: atomic { HERE(p) -> p++ }
        :: GONE(p) ->
#ifndef FAULT_NO_SECOND_POLL
           if
           :: atomic { HERE(p) -> p++ }
           :: atomic { !HERE(p) -> assert(wrote[STATUS(me, p)] < n); goto raise }
           fi
#else
           atomic { assert(wrote[STATUS(me, p)] < n); goto raise }
#endif
        :: POISONED ->
           if
           :: atomic { HERE(p) -> p++ }
           :: atomic { !HERE(p) -> goto raise }
           fi
        MAY_TIME_OUT
        fi
     :: atomic { p == me -> p++ }
     :: atomic { p == R -> p = 0; break }
     MAY_DIE
     od;
     do /* all here: the rows are pulled, perhaps much later and although a peer has raised or died meanwhile */
     :: atomic { p < R -> assert(p == me || x[p * NX + n % NX] == n); p++ }
     :: atomic { p == R -> p = 0; break }
     od
#ifdef LEAVE_EARLY
  :: n < CALLS -> break
#endif
  :: n == CALLS -> break
  od;
leave:
  do
  :: atomic { p < R -> status[STATUS(p, me)] = LEFT; p++ }
  :: atomic { p == R -> p = 0; goto over }
  od;
raise:
  p = 0;
#ifdef FAULT_NO_POISON
  goto raised;
#endif
#ifdef FAULT_POISON_ONE
  status[STATUS((me + 1) % R, me)] = POISON;
  goto raised;
#endif
  do
  :: atomic { p < R -> status[STATUS(p, me)] = POISON; p++ }
  :: atomic { p == R -> p = 0; break }
  od;
raised:
#ifdef FAULT_WRITES_ON
  x[me * NX] = 99;
  x[me * NX + 1] = 99;
#endif
  goto over;
dead:
  ended[me] = true;
over:
  n = 0; p = 0
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
