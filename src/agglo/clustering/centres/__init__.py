"""Clusters around chosen tokens: K-Medoids, farthest points, density peaks."""

from agglo.clustering.centres.operators import density_peaks, euclidean_distances, farthest_points, k_medoids

__all__ = ["density_peaks", "euclidean_distances", "farthest_points", "k_medoids"]
