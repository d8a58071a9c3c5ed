"""Events of runs for tools that draw and watch: MLflow, TensorBoard, Prometheus. Without any of these installed."""
