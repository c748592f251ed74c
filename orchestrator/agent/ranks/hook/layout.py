"""Names that the hook and the agent share: the environment of a rank, the files of its folder, and the step file's layout."""

TYPE_CHECKING = False  # typing's own costs 3 ms

# The environment that the agent sets for a rank.
RANK_DIR_ENV = "ORCH_RANK_DIR"
SUBMITTED_FROM_ENV = "ORCH_SUBMITTED_FROM"
GIVEN_ENV = (
    "ORCH_GIVEN"  # MASTER_ADDR MASTER_PORT RANK WORLD_SIZE, for the first Python of a rank: a shell may have set others
)
STACK_SIGNAL_ENV = "ORCH_STACK_SIGNAL"  # of two stack signals; the other is the next one, see `StackDumper`
ASYNC_ENV = "ORCH_ASYNC_SAVES"  # not empty: saves of torch.distributed.checkpoint are asynchronous
COMPARE_ENV = "ORCH_COMPARE_REPLICAS"  # after how many steps parameters are summed
SOCKET_ENV = "ORCH_SOCKET"  # not empty: start torch's worker server; the user may set it empty

# The files in a rank's folder.
STEP_FILE = "steps"
STEP_CLAIM_FILE = "steps-claim-{}"
STACKS_FILE = "stacks-{}.txt"
STACKS_MEMFD = "stacks-{}"  # of a forked child, listed under /proc/<pid>/fd
ERROR_FILE = "error-{}.json"
NOTES_FILE = "hook-notes.txt"
# A line for each file that may belong to a checkpoint: `pid NUMBER 0 ''` for a process whose reading is noted, else `read` or
# `written`, the step that the process had made (-1: another process makes the steps), 1 if no file of the name was there, and the path as a Python text in ASCII.
FILES_FILE = "files.txt"
GROUPS_FILE = "groups.json"
SOCKET_FILE = "torch-{}.socket"

PENDING_HANDLER = "orch_pending"  # of torch's worker server: the exception that the main thread is handling

# The step file is an array of little-endian u64: a header of 128 bytes, the time of step n at n % RING_STEPS, then a
# row of ROW_WORDS words for each step. Here a step is one of any optimizer. A group's column holds one more than the
# number of collectives that the group had entered by the end of that step, 0 where it is not known. OPTIMIZER_COLUMN
# names the optimizer of the step: OPTIMIZERS_MAX * (the number of steps of that optimizer) + the optimizer's number, 0 where it
# is not known. SCRIPT_STEP_COLUMN: the script's step, see `ScriptSteps`. GROUPS_FILE assigns the columns for the
# generation in GROUPS_WORD, which is odd while columns change. EXITING_WORD: when the process EXITING_PID_WORD was about
# to exit. THREAD_WORD: the kernel's id of the thread that made the last step. ALONE_WORD: one of ALONE_WITH, counted from
# 1, where the process trains and has formed no process group with another one; else 0. NO_STEP_WORD: 1 where the process is
# exiting, has imported torch for a script that calls `backward`, and has made no step. Before any process of the rank makes a
# step, all of them count their backward passes in PASSES_WORD, with the time of each in the ring. FORMED_WORD: 1 once
# `init_process_group` has formed torch's default group. Behind the rows are the last sums of parameters, of which
# SUMS_MADE_WORD have been made, in rows of their own: the optimizer and its step as in OPTIMIZER_COLUMN, the script's step,
# the sum. Behind these are the norms of gradients: how many in a row, up to the last, are not finite; the script's step and
# the norm (a double) of the first of them, and of the last finite one.
STEP_FILE_MAGIC = 0x4843524F  # b"ORCH" read as u32; the version is the upper half of the same word
STEP_FILE_VERSION = 7
MAGIC_WORD, PID_WORD, STEP_WORD, TIME_WORD = range(4)
EXITING_WORD, EXITING_PID_WORD, GROUPS_WORD, THREAD_WORD = range(4, 8)
NO_GROUP_WORD, NO_STEP_WORD, PASSES_WORD, FORMED_WORD, SUMS_MADE_WORD = range(8, 13)
RING_WORD = 16
RING_STEPS = 1024
GROUPS_MAX = 8
OPTIMIZERS_MAX = 8
OPTIMIZER_COLUMN, SCRIPT_STEP_COLUMN = GROUPS_MAX, GROUPS_MAX + 1
ROW_WORDS = GROUPS_MAX + 2
COUNTS_WORD = RING_WORD + RING_STEPS
SUMS_WORD = COUNTS_WORD + RING_STEPS * ROW_WORDS
SUMS_MAX, SUM_COLUMNS = 64, 3
NORMS_WORD, NORM_COLUMNS = SUMS_WORD + SUMS_MAX * SUM_COLUMNS, 5
STEP_FILE_BYTES = 8 * (NORMS_WORD + NORM_COLUMNS)
FRAMEWORKS = ("torch", "lightning", "accelerate")
