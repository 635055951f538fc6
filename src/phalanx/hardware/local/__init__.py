"""The machine at hand: its device, its measured peaks, its queue's times, and what slows it down."""
