/* Attention of a few rows to the keys and values of their texts; see attend.c. */
#ifndef PHALANX_ATTEND_H
#define PHALANX_ATTEND_H
#include "rows.h"

typedef struct {
    float *keys, *values; /* (heads, capacity, width) of the row's text */
    int64_t stride;       /* elements from one head to the next */
    int64_t position;     /* of the row in its text: it sees as many keys before it */
    int64_t last_block;   /* the block of the additions over the keys of the last, shorter, part of 512 keys; 0 where all are whole */
    int64_t keys_in_all;  /* with those that are hidden */
} Row;

typedef struct {
    const Row *rows;
    int64_t heads, kept, width;    /* kept: heads of keys and values */
    int64_t score_block, block;    /* blocks of the additions over a head's width, and over 512 keys */
    int64_t fuses_sum;             /* whether a sum over parts is rounded once */
    float scale;
    float *scratch;                /* for each thread: scores of a group of heads */
    int64_t scratch_stride;
    int64_t next;                  /* the next share, 0 at first */
} Attention;

/* Puts row `row` of key and value (rows, kept, width) where its text keeps them. */
void keep_row(const Attention *a, const float *key, const float *value, int64_t row);

/* The result (rows, heads width) of one row's queries (rows, heads, width) of the heads that read one head of keys. */
void attend_row(const Attention *a, const float *query, float *mixed, int64_t row, int64_t kept, float *scores);
#endif
