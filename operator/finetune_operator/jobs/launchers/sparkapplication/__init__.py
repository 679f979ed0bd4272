"""Launcher `sparkapplication`: a SparkApplication of the Spark Operator."""
