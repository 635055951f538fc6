"""The tensor axis: each matrix divided over ranks, the sequence between the matrices."""
