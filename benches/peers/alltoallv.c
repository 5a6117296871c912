/* Times one dispatch and one combine of a mixture-of-experts layer over MPI_Alltoallv.
 *
 *   mpicc -O3 -march=native -o alltoallv alltoallv.c
 *   mpirun -n 4 ./alltoallv [--tokens 4096] [--hidden 2048] [--experts 64] [--topk 8] [--iters 12] [--seed 1]
 *
 * Every rank has `tokens` rows of `hidden` bf16 elements and the same number of consecutive experts. Two variants run
 * alternately:
 *
 * - pairs: the usual dispatcher. One row per (token, expert) pair. dispatch copies the rows into send order (by expert,
 *   and so by rank), exchanges them, and groups them by local expert. combine copies the experts' rows back into the
 *   received order, exchanges them, and sums a token's rows.
 * - ranks: one row per (token, rank) pair. dispatch exchanges these rows, and the receiver copies each to all local
 *   experts of its token. combine first sums a token's rows on the experts' rank, and sends one partial sum in bf16. A
 *   rank's own rows do not pass through MPI.
 *
 * Sums are in f32, written as bf16. All index arithmetic, and the exchange of the routing, is done before the timed part.
 *
 * The routing is uniform: for each (rank, token), `topk` distinct experts, the first places of a Fisher-Yates shuffle
 * driven by splitmix64. Tokens are random bits from the same generator: see workload.h.
 *
 * Before the timed part, each variant runs once with experts that multiply by 1, 2 and 4, and every element of the
 * received rows and of the combined tokens is compared with its definition.
 *
 * A time is that of the slowest rank. Each rank measures from its return from a barrier. The figure is the median over
 * iterations. Rank 0 prints one line of JSON. Exit status: 0 = right results; 1 = wrong results; 2 = wrong arguments,
 * or no memory. */

#include <errno.h>
#include <limits.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "workload.h"

enum { WARM_UP = 2, VARIANTS = 2, PAIRS = 0, RANKS = 1, DISPATCH = 0, COMBINE = 1 };
static const char *const NAMES[VARIANTS] = {"pairs", "ranks"};

static int ranks, me, local; /* `local`: experts of a rank. */
static MPI_Datatype row_type;

/* Ends all ranks. Rank 0 prints `text`, because all ranks see the same arguments. */
static void refuse(const char *text, const char *value) {
    if (me == 0) {
        fprintf(stderr, "alltoallv: %s%s\n", text, value);
    }
    MPI_Finalize();
    exit(2);
}

/* Memory whose pages exist, in huge pages where the system has them: copies between processes are faster from these. */
static void *allocate(size_t bytes) {
    size_t huge = (size_t)2 << 20, whole = (bytes / huge + 1) * huge;
    void *memory = aligned_alloc(huge, whole);
    if (memory == NULL) {
        fprintf(stderr, "alltoallv: rank %d: no memory for %zu bytes: take smaller sizes\n", me, whole);
        MPI_Abort(MPI_COMM_WORLD, 2);
        abort();
    }
    /* Without huge pages the program is slower and still right. */
    (void)madvise(memory, whole, MADV_HUGEPAGE);
    memset(memory, 0, whole);
    return memory;
}

static int *integers(size_t count) { return allocate(count * sizeof(int)); }

static bf16 *rows_of(size_t count) { return allocate(count * (size_t)size.hidden * sizeof(bf16)); }

static bf16 *row(bf16 *rows, int number) { return rows + (size_t)number * (size_t)size.hidden; }

static void copy_row(bf16 *to, const bf16 *from) { memcpy(to, from, (size_t)size.hidden * sizeof(bf16)); }

/* ---- The routing, and the plans that follow from it ---- */

static int *routing; /* Experts of all tokens of all ranks: [ranks][tokens][topk]. */

static const int *experts_of(int rank, int token) {
    return routing + ((size_t)rank * (size_t)size.tokens + (size_t)token) * (size_t)size.topk;
}

static int owner(int expert) { return expert / local; }

/* The exchange of one variant. Rows to send are sorted by destination, received rows by source. */
struct plan {
    int *sent, *sent_at, *received, *received_at; /* Rows for and from each rank, and where they begin. */
    int *token_of;                                /* For each row to send: its token. */
    int *back_at, *back; /* The rows to send of token t, in order, are back[back_at[t]] to back[back_at[t + 1] - 1]. */
};

static struct plan plans[VARIANTS];
static int arrived;    /* Copies for this rank's experts. */
static int *group;     /* The rows of local expert e are group[e] to group[e + 1] - 1. */
static int *final_row; /* pairs: for each received row, its place among the rows grouped by local expert. */

/* ranks: a visit is one token that comes to this rank, by source and token. */
static int visits;
static int *visit_source, *visit_token;
static int *copies_at, *copies; /* The grouped rows of visit v: copies[copies_at[v]] to copies[copies_at[v + 1] - 1]. */

static int visits_rank(int source, int token, int rank) {
    for (int k = 0; k < size.topk; k++) {
        if (owner(experts_of(source, token)[k]) == rank) {
            return 1;
        }
    }
    return 0;
}

static int has_expert(int source, int token, int expert) {
    for (int k = 0; k < size.topk; k++) {
        if (experts_of(source, token)[k] == expert) {
            return 1;
        }
    }
    return 0;
}

static void draw_routing(void) {
    int *deck = integers((size_t)size.experts);
    routing = integers((size_t)ranks * (size_t)size.tokens * (size_t)size.topk);
    for (int source = 0; source < ranks; source++) {
        for (int token = 0; token < size.tokens; token++) {
            draw_experts(source, token, (int *)experts_of(source, token), deck);
        }
    }
    free(deck);
}

/* Whether a variant sends a row of this token to `rank` for this part. In `pairs`, the parts are the local experts of
 * `rank`; in `ranks`, there is one part. */
static int sends(int variant, int source, int token, int rank, int part) {
    return variant == RANKS ? visits_rank(source, token, rank) : has_expert(source, token, rank * local + part);
}

static void make_plan(int variant) {
    struct plan *plan = &plans[variant];
    int parts = variant == RANKS ? 1 : local, most = size.tokens * size.topk, number = 0;
    plan->sent = integers((size_t)ranks), plan->sent_at = integers((size_t)ranks + 1);
    plan->received = integers((size_t)ranks), plan->received_at = integers((size_t)ranks + 1);
    plan->token_of = integers((size_t)most), plan->back = integers((size_t)most);
    plan->back_at = integers((size_t)size.tokens + 1);
    for (int rank = 0; rank < ranks; rank++) {
        for (int part = 0; part < parts; part++) {
            for (int token = 0; token < size.tokens; token++) {
                /* In `ranks`, a rank's own rows stay where they are. They still have a place for their partial sums. */
                if (sends(variant, me, token, rank, part)) {
                    plan->token_of[number++] = token;
                    plan->back_at[token + 1]++;
                }
                plan->received[rank] += sends(variant, rank, token, me, part);
            }
        }
        plan->sent_at[rank + 1] = number;
        plan->sent[rank] = number - plan->sent_at[rank];
        plan->received_at[rank + 1] = plan->received_at[rank] + plan->received[rank];
    }
    for (int token = 0; token < size.tokens; token++) {
        plan->back_at[token + 1] += plan->back_at[token];
    }
    int *next = integers((size_t)size.tokens);
    for (int i = 0; i < number; i++) {
        int token = plan->token_of[i];
        plan->back[plan->back_at[token] + next[token]++] = i;
    }
    free(next);
    if (variant == RANKS) {
        plan->sent[me] = plan->received[me] = 0;
    }
}

/* Assigns the grouped rows: by local expert, then by source, then by token. */
static void place_rows(void) {
    group = integers((size_t)local + 1);
    arrived = plans[PAIRS].received_at[ranks];
    final_row = integers((size_t)arrived), copies = integers((size_t)arrived);
    visits = plans[RANKS].received_at[ranks];
    visit_source = integers((size_t)visits), visit_token = integers((size_t)visits);
    copies_at = integers((size_t)visits + 1);
    int *next = integers((size_t)local);
    for (int pass = 0; pass < 2; pass++) {
        for (int source = 0, visit = 0, copy = 0; source < ranks; source++) {
            for (int token = 0; token < size.tokens; token++) {
                for (int e = 0; e < local; e++) {
                    if (!has_expert(source, token, me * local + e)) {
                        continue;
                    }
                    if (pass == 0) {
                        group[e + 1]++;
                    } else {
                        copies[copy++] = group[e] + next[e]++;
                    }
                }
                if (pass == 1 && visits_rank(source, token, me)) {
                    visit_source[visit] = source, visit_token[visit] = token;
                    copies_at[++visit] = copy;
                }
            }
        }
        for (int e = 0; pass == 0 && e < local; e++) {
            group[e + 1] += group[e];
        }
    }
    memset(next, 0, (size_t)local * sizeof *next);
    for (int source = 0, i = 0; source < ranks; source++) {
        for (int e = 0; e < local; e++) {
            for (int token = 0; token < size.tokens; token++) {
                if (has_expert(source, token, me * local + e)) {
                    final_row[i++] = group[e] + next[e]++;
                }
            }
        }
    }
    free(next);
}

/* ---- The operators ---- */

static bf16 *tokens, *combined; /* [tokens][hidden] */
static bf16 *leaving, *coming;  /* What this rank sends and receives in dispatch; the other way round in combine. */
static bf16 *grouped;           /* The rows by local expert: the experts' input, and, in place, their output. */

static void exchange(const struct plan *plan, bf16 *from, bf16 *to, int direction) {
    if (direction == DISPATCH) {
        MPI_Alltoallv(from, plan->sent, plan->sent_at, row_type, to, plan->received, plan->received_at, row_type,
                      MPI_COMM_WORLD);
    } else {
        MPI_Alltoallv(from, plan->received, plan->received_at, row_type, to, plan->sent, plan->sent_at, row_type,
                      MPI_COMM_WORLD);
    }
}

static void dispatch_pairs(void) {
    const struct plan *plan = &plans[PAIRS];
    for (int i = 0; i < plan->sent_at[ranks]; i++) {
        copy_row(row(leaving, i), row(tokens, plan->token_of[i]));
    }
    exchange(plan, leaving, coming, DISPATCH);
    for (int i = 0; i < arrived; i++) {
        copy_row(row(grouped, final_row[i]), row(coming, i));
    }
}

/* Sums the rows of each token that came back, in the order in which they were sent. */
static void sum_tokens(const struct plan *plan, const bf16 **in) {
    for (int token = 0; token < size.tokens; token++) {
        int begin = plan->back_at[token], count = plan->back_at[token + 1] - begin;
        for (int i = 0; i < count; i++) {
            in[i] = row(leaving, plan->back[begin + i]);
        }
        sum_rows(row(combined, token), in, count);
    }
}

static void combine_pairs(const bf16 **in) {
    const struct plan *plan = &plans[PAIRS];
    for (int i = 0; i < arrived; i++) {
        copy_row(row(coming, i), row(grouped, final_row[i]));
    }
    exchange(plan, coming, leaving, COMBINE);
    sum_tokens(plan, in);
}

static void dispatch_ranks(void) {
    const struct plan *plan = &plans[RANKS];
    for (int rank = 0; rank < ranks; rank++) {
        for (int i = plan->sent_at[rank]; rank != me && i < plan->sent_at[rank + 1]; i++) {
            copy_row(row(leaving, i), row(tokens, plan->token_of[i]));
        }
    }
    exchange(plan, leaving, coming, DISPATCH);
    for (int v = 0; v < visits; v++) {
        const bf16 *from = visit_source[v] == me ? row(tokens, visit_token[v]) : row(coming, v);
        for (int i = copies_at[v]; i < copies_at[v + 1]; i++) {
            copy_row(row(grouped, copies[i]), from);
        }
    }
}

static void combine_ranks(const bf16 **in) {
    const struct plan *plan = &plans[RANKS];
    int own = plan->sent_at[me] - plan->received_at[me]; /* This rank's visit v has place own + v in `leaving`. */
    for (int v = 0; v < visits; v++) {
        int count = copies_at[v + 1] - copies_at[v];
        for (int i = 0; i < count; i++) {
            in[i] = row(grouped, copies[copies_at[v] + i]);
        }
        sum_rows(visit_source[v] == me ? row(leaving, own + v) : row(coming, v), in, count);
    }
    exchange(plan, coming, leaving, COMBINE);
    sum_tokens(plan, in);
}

static void run(int variant, int operator, const bf16 **in) {
    if (operator == DISPATCH) {
        variant == PAIRS ? dispatch_pairs() : dispatch_ranks();
    } else {
        variant == PAIRS ? combine_pairs(in) : combine_ranks(in);
    }
}

/* ---- The check ---- */

/* Experts multiply by 1, 2 or 4, so that a row of another expert changes the sum. */
static int doublings(int expert) { return expert % 3; }

/* Counts the rows that differ from the tokens that the routing assigns to them, and runs the experts on all rows. */
static long check_rows(bf16 *expected) {
    long wrong = 0;
    for (int e = 0; e < local; e++) {
        int place = group[e];
        for (int source = 0; source < ranks; source++) {
            for (int token = 0; token < size.tokens; token++) {
                if (!has_expert(source, token, me * local + e)) {
                    continue;
                }
                bf16 *found = row(grouped, place++);
                draw_row(source, token, expected);
                wrong += memcmp(found, expected, (size_t)size.hidden * sizeof(bf16)) != 0;
                for (int j = 0; j < size.hidden; j++) {
                    found[j] = narrow(widen(found[j]) * (float)(1 << doublings(me * local + e)));
                }
            }
        }
    }
    return wrong;
}

/* The combined element of a token whose element is `value`, from the definition of the variant. */
static bf16 definition(int variant, int token, float value) {
    float sum = 0;
    for (int rank = 0; rank < ranks; rank++) {
        float partial = 0;
        for (int k = 0; k < size.topk; k++) {
            int expert = experts_of(me, token)[k];
            partial += owner(expert) == rank ? value * (float)(1 << doublings(expert)) : 0;
        }
        sum += variant == RANKS ? widen(narrow(partial)) : partial;
    }
    return narrow(sum);
}

static long check_combined(int variant) {
    long wrong = 0;
    for (int token = 0; token < size.tokens; token++) {
        int differs = 0;
        for (int j = 0; j < size.hidden; j++) {
            differs |= row(combined, token)[j] != definition(variant, token, widen(row(tokens, token)[j]));
        }
        wrong += differs;
    }
    return wrong;
}

static int check(int variant, const bf16 **in) {
    bf16 *expected = rows_of(1);
    long wrong[2], all[2];
    memset(grouped, 0xff, (size_t)arrived * (size_t)size.hidden * sizeof(bf16));
    run(variant, DISPATCH, in);
    wrong[DISPATCH] = check_rows(expected);
    memset(combined, 0xff, (size_t)size.tokens * (size_t)size.hidden * sizeof(bf16));
    run(variant, COMBINE, in);
    wrong[COMBINE] = check_combined(variant);
    free(expected);
    MPI_Allreduce(wrong, all, 2, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (me == 0 && (all[DISPATCH] || all[COMBINE])) {
        fprintf(stderr, "alltoallv: %s: %ld received rows and %ld combined tokens are wrong; nothing was timed\n",
                NAMES[variant], all[DISPATCH], all[COMBINE]);
    }
    return all[DISPATCH] || all[COMBINE];
}

/* ---- The measurement ---- */

static double *samples[VARIANTS][2];

static void measure(const bf16 **in) {
    for (int iteration = -WARM_UP; iteration < size.iters; iteration++) {
        for (int turn = 0; turn < VARIANTS; turn++) {
            int variant = (turn + iteration + WARM_UP) % VARIANTS;
            for (int operator = DISPATCH; operator <= COMBINE; operator++) {
                MPI_Barrier(MPI_COMM_WORLD);
                double seconds = -MPI_Wtime(), slowest;
                run(variant, operator, in);
                seconds += MPI_Wtime();
                MPI_Allreduce(&seconds, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
                if (iteration >= 0) {
                    samples[variant][operator][iteration] = slowest;
                }
            }
        }
    }
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median_ms(double *seconds) {
    qsort(seconds, (size_t)size.iters, sizeof *seconds, ascending);
    return 1e3 * (seconds[(size.iters - 1) / 2] + seconds[size.iters / 2]) / 2;
}

static void report(double max_over_mean) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(library, &length);
    library[strcspn(library, ",\"\\\n")] = '\0'; /* The name and version, without characters that JSON escapes. */
    printf("{\"library\": \"%s\", \"ranks\": %d, \"tokens\": %d, \"hidden\": %d, \"experts\": %d, \"topk\": %d, "
           "\"iterations\": %d, \"warm_up_iterations\": %d, \"seed\": %d, \"verified\": true, "
           "\"rank_max_over_mean\": %.4f",
           library, ranks, size.tokens, size.hidden, size.experts, size.topk, size.iters, WARM_UP, size.seed,
           max_over_mean);
    for (int variant = 0; variant < VARIANTS; variant++) {
        printf(", \"%s\": {\"dispatch_ms\": %.3f, \"combine_ms\": %.3f}", NAMES[variant],
               median_ms(samples[variant][DISPATCH]), median_ms(samples[variant][COMBINE]));
    }
    printf("}\n");
}

/* ---- The program ---- */

static void parse(int count, char **arguments) {
    const struct {
        const char *name;
        int *value;
    } options[] = {{"--tokens", &size.tokens}, {"--hidden", &size.hidden}, {"--experts", &size.experts},
                   {"--topk", &size.topk},     {"--iters", &size.iters},   {"--seed", &size.seed}};
    for (int i = 1; i < count; i += 2) {
        size_t option = 0, known = sizeof options / sizeof *options;
        while (option < known && strcmp(arguments[i], options[option].name) != 0) {
            option++;
        }
        if (option == known) {
            refuse("unknown option; the first comment of alltoallv.c lists the options: ", arguments[i]);
        }
        char *end = "";
        long value = 0;
        errno = 0;
        if (i + 1 < count) {
            value = strtol(arguments[i + 1], &end, 10);
        }
        if (value < 1 || value > INT_MAX || errno != 0 || *end != '\0') {
            refuse("the option needs a whole number of at least 1: ", arguments[i]);
        }
        *options[option].value = (int)value;
    }
    if (size.experts % ranks != 0) {
        refuse("--experts must be a multiple of the number of ranks", "");
    }
    if (size.topk > size.experts) {
        refuse("--topk is above --experts", "");
    }
    /* A rank receives at most all copies of all ranks. Counts of rows are ints in MPI. */
    if ((int64_t)ranks * size.tokens * size.topk > INT_MAX) {
        refuse("more than 2^31 - 1 copies: take fewer --tokens", "");
    }
}

int main(int count, char **arguments) {
    MPI_Init(&count, &arguments);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    parse(count, arguments);
    local = size.experts / ranks;
    /* Counts in rows cannot overflow where counts in elements could. */
    MPI_Type_contiguous(size.hidden, MPI_UINT16_T, &row_type);
    MPI_Type_commit(&row_type);

    draw_routing();
    make_plan(PAIRS);
    make_plan(RANKS);
    place_rows();
    tokens = rows_of((size_t)size.tokens), combined = rows_of((size_t)size.tokens);
    for (int token = 0; token < size.tokens; token++) {
        draw_row(me, token, row(tokens, token));
    }
    leaving = rows_of((size_t)size.tokens * (size_t)size.topk);
    coming = rows_of((size_t)arrived), grouped = rows_of((size_t)arrived);
    const bf16 **in = allocate((size_t)size.topk * sizeof *in);
    for (int variant = 0; variant < VARIANTS; variant++) {
        for (int operator = DISPATCH; operator <= COMBINE; operator++) {
            samples[variant][operator] = allocate((size_t)size.iters * sizeof(double));
        }
    }

    int failed = 0, fullest;
    for (int variant = 0; variant < VARIANTS; variant++) {
        failed |= check(variant, in);
    }
    if (!failed) {
        measure(in);
        MPI_Allreduce(&arrived, &fullest, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
        if (me == 0) {
            report((double)fullest / ((double)size.tokens * size.topk));
        }
    }
    MPI_Finalize();
    return failed;
}
