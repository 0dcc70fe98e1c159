"""What a prefill kernel for sm_90 is compiled for: one object of
constants, which the host makes and device code reads."""

from dataclasses import dataclass

FIRST_BARRIER = 5  # of the sixteen hardware barriers Triton takes 0 .. 4 for itself
TURN_BARRIERS = 13  # one for each group of consumers


@dataclass(frozen=True)
class PrefillShape:
    """Constants of one compiled prefill kernel.

    D1 + D2: columns of Q and K, in two parts; V1 + V2: of V; HEAD_V: columns of V that are stored. DT: Gluon's element
    type. N: keys of a tile. STAGES: slots of K and of V. WG: consumer warp groups, of 64 rows each. QBUF: buffers of Q.
    HAS_RIGHT: some key to the right is hidden. RAGGED: packed sequences. PAGE: tokens of a page, or 0. NUM_RANGES: of
    ``RangeWindows``. CAP: as ``softcap_kind`` says. NEGATIVE: the scale is. SPLIT: parts in float32, merged by a second
    launch. DYNAMIC: work items come from a counter. TURNS: groups pass the tensor cores on to each other. K_AHEAD: K of
    a tile is brought before V of the tile before. ALIGNED: the diagonal runs through the corners of the tiles, so that
    of a work item only the first tile needs a mask, and the first group half of that one.
    Q's memory is given back after the last scores and a hardware barrier (Q_EARLY), or takes the output first (O_IN_Q).
    DIRECT: the output is stored straight from registers. CHAINS, HALVES: see ``dflash2_softmax``.
    CONSUMER_REGS, PRODUCER_REGS: registers of a thread.
    """

    D1: int
    D2: int
    V1: int
    V2: int
    HEAD_V: int
    DT: object
    N: int
    STAGES: int
    WG: int
    QBUF: int
    HAS_RIGHT: bool
    RAGGED: bool
    PAGE: int
    NUM_RANGES: int
    CAP: int
    NEGATIVE: bool
    HAS_SINKS: bool
    HAS_LSE: bool
    SPLIT: bool
    DYNAMIC: bool
    TURNS: bool
    K_AHEAD: bool
    ALIGNED: bool
    O_IN_Q: bool
    DIRECT: bool
    Q_EARLY: bool
    CHAINS: bool
    HALVES: bool
    CONSUMER_REGS: int
    PRODUCER_REGS: int

    @property
    def BLOCK_M(self):
        """Rows of a tile of queries."""
        return 64 * self.WG

    @property
    def THREADS(self):
        """Threads that meet where a slot of K or V is given back: all consumers and the producer's warp."""
        return 128 * self.WG + 32

    @property
    def K_FREE(self):
        """The first of STAGES named barriers, at which consumers give slots of K back."""
        return FIRST_BARRIER

    @property
    def V_FREE(self):
        """The first of STAGES named barriers, at which consumers give slots of V back."""
        return FIRST_BARRIER + self.STAGES

    @property
    def Q_FREE(self):
        """The first of WG named barriers, at which a group gives its Q back (Q_EARLY)."""
        return FIRST_BARRIER + 2 * self.STAGES

    @property
    def CLEAN(self):
        """Whether a tile of V may hold rows that no query of this work item sees."""
        return self.RAGGED or self.NUM_RANGES > 0

    @property
    def FULL_STORE(self):
        """Whether the copy engine stores the output; else every thread stores its own."""
        return not (self.RAGGED or self.SPLIT or self.DIRECT)
