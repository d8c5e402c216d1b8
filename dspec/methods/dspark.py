"""DSpark: DFlash plus a sequential head, a confidence head and total-variation matching.

Source: "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation" (DeepSeek-AI and Peking
University, arXiv 2607.05147), sections 2-4, with the arithmetic of DeepSpec@afdfa7c:

    L = a_ce L_ce + a_tv L_tv + a_conf L_conf, each of them a sum over slots weighted by w_k = exp(-k / gamma)
    L_tv = sum_v |p_draft - p_target|, twice the total variation
    L_conf = BCE(confidence, c*), c* = 1 - L_tv / 2, detached

The computation is in methods/drafter.py. Departures: as DFlash's (methods/dflash.py). The confidence loss also trains
the backbone, as in DeepSpec. Temperatures (STS) are fitted afterwards, by dspec/calibration/sts.py.
"""

from dspec.methods.drafter import DrafterMethod


class DSpark(DrafterMethod):
    """Trains a drafter and the heads that it has, teacher-forced."""
