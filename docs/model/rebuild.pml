/* Rebuild: after a loss the survivors agree on who they are and go on as a new generation.
 *
 * Each generation makes one call: records, rows, done. Any wait may time out although the peer is only slow, and up to DEATHS
 * ranks die at any step. A rank that gives a generation up joins the next one; the set of those who joined is decided by
 * compare-and-set from empty, so the first decision wins; who isn't in it is excluded; the others meet at a barrier, with a
 * timeout that leads to the generation after. A slow rank finds all that out late: until then it is a zombie that writes.
 *
 * Windows: new ones for each generation, or (SAME_WINDOWS) the old ones with the generation in records and flags. Then rows in
 * final positions, whose places depend on who is there, aren't safe; rows in one place for each source are, and rows that are
 * pulled are when the reader looks at the source's generation after the copy.
 *
 * Claims: a call that returns has the right rows; all who go on are in the same set.
 *
 * Parameters: R ranks (3), GENERATIONS, DEATHS;
 *   PULL rows stay in their source's window, with RECHECK the generation is looked at after the copy; FINAL rows stand in final
 *   positions; SAME_WINDOWS; LATE_STORE a store may still be in flight when its rank gives up, and land later.
 * Faults: FAULT_NO_CAS each survivor takes the set that it saw; SAME_WINDOWS with FINAL, with LATE_STORE, or with PULL and no
 *   RECHECK.
 */
#ifndef R
#define R 3
#endif
#ifndef GENERATIONS
#define GENERATIONS 2
#endif
#ifndef DEATHS
#define DEATHS 0
#endif

#ifdef SAME_WINDOWS
#define WINDOWS 1
#define WINDOW(g) 0
#else
#define WINDOWS GENERATIONS
#define WINDOW(g) (g)
#endif
#define IN(set, p) (((set) >> (p)) & 1)
#define EVERYONE ((1 << R) - 1)
#ifdef FINAL /* by the sources of the set that come before */
#define PLACE(destination, source, set)                                                                                        \
  ((0 < (source) && 0 != (destination) && IN(set, 0)) + (1 < (source) && 1 != (destination) && IN(set, 1)))
#else
#define PLACE(destination, source, set) (source)
#endif
#define TAG(g, source) (((g) + 1) * 8 + (source))
#define MARK(g) ((g) + 1) /* what records and flags of generation g hold */

#define CELL(g, owner, writer) ((WINDOW(g) * R + (owner)) * R + (writer))
byte rec[WINDOWS * R * R];
byte flag[WINDOWS * R * R];
byte row[WINDOWS * R * R];
byte x[WINDOWS * R];
byte generation[R]; /* header of each rank's window */

/* What the survivors agree with: shared control memory or a store. */
byte joined[GENERATIONS], decided[GENERATIONS], arrived[GENERATIONS];
byte deaths;

#if DEATHS > 0
#define MAY_DIE :: atomic { deaths < DEATHS -> deaths++; goto over }
#else
#define MAY_DIE
#endif
#define OTHER(p) ((p) < R && (p) != me && IN(set, p))
#define SKIPPED(p) ((p) < R && !((p) != me && IN(set, p)))

proctype Rank(byte me) {
  byte g, p, set, seen;
#ifdef LATE_STORE
  byte late_for, late_g, late_set; /* late_for: destination + 1 of a row in flight */
#endif
  set = EVERYONE;
call:
  atomic {
    generation[me] = g;
#ifdef PULL
    x[WINDOW(g) * R + me] = TAG(g, me);
#endif
    p = 0
  };
  do
  :: atomic { OTHER(p) -> rec[CELL(g, p, me)] = MARK(g); p++ }
  :: atomic { SKIPPED(p) -> p++ }
  :: atomic { p == R -> p = 0; break }
  MAY_DIE
  od;
  do
  :: atomic { OTHER(p) && rec[CELL(g, me, p)] == MARK(g) -> p++ }
  :: atomic { OTHER(p) && rec[CELL(g, me, p)] != MARK(g) -> goto give_up } /* timed out */
  :: atomic { SKIPPED(p) -> p++ }
  :: atomic { p == R -> p = 0; break }
  MAY_DIE
  od;
#ifdef PULL
  do
  :: atomic { OTHER(p) -> seen = x[WINDOW(g) * R + p] };
#ifdef RECHECK
     if
     :: atomic { generation[p] != g -> seen = 0; goto give_up }
     :: atomic { generation[p] == g -> assert(seen == TAG(g, p)); seen = 0; p++ }
     fi
#else
     atomic { assert(seen == TAG(g, p)); seen = 0; p++ }
#endif
  :: atomic { SKIPPED(p) -> p++ }
  :: atomic { p == R -> p = 0; break }
  od;
#else
  do /* two steps a peer: a rank can be slow between them */
  :: atomic { OTHER(p) -> row[CELL(g, p, PLACE(p, me, set))] = TAG(g, me) };
     atomic { flag[CELL(g, p, me)] = MARK(g); p++ }
  :: atomic { SKIPPED(p) -> p++ }
  :: atomic { p == R -> p = 0; break }
#ifdef LATE_STORE
  :: atomic { OTHER(p) && late_for == 0 -> late_for = p + 1; late_g = g; late_set = set; goto give_up }
#endif
  MAY_DIE
  od;
  do
  :: atomic { OTHER(p) && flag[CELL(g, me, p)] == MARK(g) -> p++ }
  :: atomic { OTHER(p) && flag[CELL(g, me, p)] != MARK(g) -> goto give_up }
  :: atomic { SKIPPED(p) -> p++ }
  :: atomic { p == R -> p = 0; break }
  MAY_DIE
  od;
#ifdef LATE_STORE
  atomic {
    if
    :: late_for > 0 -> row[CELL(late_g, late_for - 1, PLACE((late_for - 1), me, late_set))] = TAG(late_g, me); late_for = 0
    :: true
    fi
  };
#endif
  do /* the rows are used, perhaps much later */
  :: atomic { OTHER(p) -> assert(row[CELL(g, me, PLACE(me, p, set))] == TAG(g, p)); p++ }
  :: atomic { SKIPPED(p) -> p++ }
  :: atomic { p == R -> p = 0; break }
  od;
#endif
  if /* a rank whose peers have moved on learns of it at its next wait */
  :: goto over
  :: atomic { g + 1 < GENERATIONS && joined[g + 1] != 0 -> goto give_up }
  fi;
give_up:
  atomic {
    p = 0;
    g++;
    if
    :: g == GENERATIONS -> goto over
    :: else -> joined[g] = joined[g] | (1 << me)
    fi
  };
  if
#ifdef FAULT_NO_CAS
  :: set = joined[g]
#else
  :: atomic { decided[g] == 0 -> decided[g] = joined[g]; set = joined[g] }
  :: atomic { decided[g] != 0 -> set = decided[g] }
#endif
  MAY_DIE
  fi;
  atomic {
    if
    :: !IN(set, me) -> goto over /* excluded */
    :: else -> arrived[g] = arrived[g] | (1 << me)
    fi
  };
#ifdef FAULT_NO_CAS
  atomic { assert(decided[g] == 0 || decided[g] == set); decided[g] = set };
#endif
  if
  :: (arrived[g] & set) == set
  :: atomic { (arrived[g] & set) != set -> goto give_up }
  MAY_DIE
  fi;
  goto call;
over:
  skip
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
