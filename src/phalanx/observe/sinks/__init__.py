"""Outside trackers that get a run's events: TensorBoard, Weights & Biases, MLflow."""
