"""Kubernetes manifests as they are rendered.

manifests  of each overlay, by `kubectl kustomize`
policies   rules that every pod keeps, with what breaks each
"""
