"""Engines that run models on jitfp4: one module or package for each; importing this imports no engine."""
