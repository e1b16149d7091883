"""Engines that run models on jitfp4: one module an engine, and below them what they share. Each is imported by name."""
