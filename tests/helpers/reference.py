"""Independent twin of the gated-MLP measures: plain loops over floats, written from the formulas.

Symbols: a[t][j], b[t][j] are gate and up pre-activations of neuron j on token t (any nested
sequence or 2-D array, read with float()); g(a, b) is the unit and h = g(a, b) its output;
w[j] is the value weight (squared norm of the value vector).  A measure per neuron uses sums
over tokens; a measure per layer ("pooled") sums numerator and denominator over neurons with
weights w_j and divides once.  A ratio with denominator 0 is nan.  At a kink the derivative is
the one from the left (no measure depends on it: a sigma'(a) - sigma(a) is 0 at a = 0 there).
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

Grid = Sequence[Sequence[float]]  # indexed [token][neuron]
Vector = Sequence[float]
Scalar = Callable[[float], float]
Unit = Callable[[float, float], float]
Slopes = tuple[float, float]  # lim sigma(z)/z on the (negative side, positive side)
QUADRANTS = ("pp", "pn", "np", "nn")  # sign of a, then sign of b; p is > 0, n is <= 0


class Comparison(NamedTuple):
    """Asymmetry A and relative change, per neuron and pooled over the layer."""

    asymmetry: list[float]
    change: list[float]
    pooled_asymmetry: float
    pooled_change: float


def ratio(numerator: float, denominator: float) -> float:
    """Numerator / denominator, nan where the denominator is 0."""
    return numerator / denominator if denominator != 0 else math.nan


def median(values: Vector) -> float:
    """Exact median: the middle value, or the mean of the two middle ones; nan if empty."""
    ordered, n = sorted(values), len(values)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2 if n else math.nan


def quantile(values: Vector, q: float) -> float:
    """The value at rank q (n - 1), between two ranks on the line through both."""
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (rank - math.floor(rank)) * (high - low)


def column(x: Grid, j: int) -> list[float]:
    """Neuron j's values over the tokens."""
    return [float(row[j]) for row in x]


def dot(x: Vector, y: Vector) -> float:
    """Sum of products."""
    return math.fsum(float(x_i) * float(y_i) for x_i, y_i in zip(x, y))


def apply(f: Unit, a: Grid, b: Grid) -> Grid:
    """f(a, b) on every token and neuron."""
    return [[f(float(x), float(y)) for x, y in zip(row_a, row_b)] for row_a, row_b in zip(a, b)]


def gate_unit(sigma: Scalar) -> Unit:
    """The gate-activation unit g(a, b) = sigma(a) b."""
    return lambda a, b: sigma(a) * b


def compare(f: Grid, f_prime: Grid, w: Vector) -> Comparison:
    """A = sum (f-f')^2 / (2 (sum f^2 + sum f'^2)), change = sqrt(sum (f'-f)^2 / sum f^2)."""
    asymmetry, change = [], []
    differences, energies, energies_prime = [], [], []
    for j in range(len(w)):
        x, y = column(f, j), column(f_prime, j)
        d = [y_t - x_t for x_t, y_t in zip(x, y)]
        dd, xx, yy = dot(d, d), dot(x, x), dot(y, y)
        asymmetry.append(ratio(dd, 2 * (xx + yy)))
        change.append(math.sqrt(ratio(dd, xx)))
        differences.append(dd)
        energies.append(xx)
        energies_prime.append(yy)
    dd, xx, yy = dot(w, differences), dot(w, energies), dot(w, energies_prime)
    return Comparison(asymmetry, change, ratio(dd, 2 * (xx + yy)), math.sqrt(ratio(dd, xx)))


def exchange(g: Unit, a: Grid, b: Grid, w: Vector) -> Comparison:
    """g(a, b) against g(b, a)."""
    return compare(apply(g, a, b), apply(g, b, a), w)


def scaling(g: Unit, a: Grid, b: Grid, w: Vector, alpha: float) -> Comparison:
    """g(a, b) against g(alpha a, b / alpha), alpha != 0."""
    return compare(apply(g, a, b), apply(lambda x, y: g(alpha * x, y / alpha), a, b), w)


def scaling_limit(sigma: Scalar, slopes: Slopes, a: Grid, b: Grid, w: Vector) -> Comparison:
    """sigma(a) b against its limit slope(sign of a) a b; slopes at zero for alpha -> 0+,
    slopes at infinity for alpha -> infinity."""
    limit = apply(lambda x, y: (slopes[1] if x > 0 else slopes[0]) * x * y, a, b)
    return compare(apply(gate_unit(sigma), a, b), limit, w)


def placement(g: Unit, a: Grid, b: Grid, w: Vector) -> Comparison:
    """g(a, b) against g(a b, 1)."""
    return compare(apply(g, a, b), apply(lambda x, y: g(x * y, 1.0), a, b), w)


def per_token_exchange(g: Unit, a: Grid, b: Grid, w: Vector) -> tuple[list[float], float]:
    """Exchange asymmetry of each token, pooled over neurons with w; and its median over the
    tokens where it is defined (not nan)."""
    per_token = [exchange(g, [a[t]], [b[t]], w).pooled_asymmetry for t in range(len(a))]
    return per_token, median([x for x in per_token if not math.isnan(x)])


def _residual(derivative: Grid, h: Grid, w: Vector) -> tuple[list[float], float]:
    """sqrt(sum derivative^2 / sum h^2), per neuron and pooled."""
    dd = [dot(column(derivative, j), column(derivative, j)) for j in range(len(w))]
    hh = [dot(column(h, j), column(h, j)) for j in range(len(w))]
    return ([math.sqrt(ratio(n, d)) for n, d in zip(dd, hh)], math.sqrt(ratio(dot(w, dd), dot(w, hh))))


def euler_residual(sigma: Scalar, dsigma: Scalar, a: Grid, b: Grid, w: Vector) -> tuple[list[float], float]:
    """sqrt(sum b^2 (a sigma'(a) - sigma(a))^2 / sum h^2), h = sigma(a) b; (per neuron, pooled)."""
    derivative = apply(lambda x, y: y * (x * dsigma(x) - sigma(x)), a, b)
    return _residual(derivative, apply(gate_unit(sigma), a, b), w)


def euler_residual_generic(g: Unit, a: Grid, b: Grid, w: Vector, step: float = 1e-6) -> tuple[list[float], float]:
    """The same for any g: central difference of g(alpha a, b / alpha) in alpha at alpha = 1."""
    up, down = 1 + step, 1 - step
    derivative = apply(lambda x, y: (g(up * x, y / up) - g(down * x, y / down)) / (2 * step), a, b)
    return _residual(derivative, apply(g, a, b), w)


def bilinear(g: Unit, a: Grid, b: Grid, w: Vector) -> tuple[list[float], list[float], float]:
    """(share per neuron, coefficient c per neuron, layer share), with p = a b.
    A neuron with sum p^2 = 0 adds 0 to the layer's numerator."""
    h, p = apply(g, a, b), apply(lambda x, y: x * y, a, b)
    shares, coefficients, explained, energies = [], [], [], []
    for j in range(len(w)):
        h_j, p_j = column(h, j), column(p, j)
        hp, hh, pp = dot(h_j, p_j), dot(h_j, h_j), dot(p_j, p_j)
        shares.append(ratio(hp * hp, hh * pp))
        coefficients.append(ratio(hp, pp))
        explained.append(hp * hp / pp if pp != 0 else 0.0)
        energies.append(hh)
    return shares, coefficients, ratio(dot(w, explained), dot(w, energies))


def quadrants(
    g: Unit, a: Grid, b: Grid, w: Vector
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float], dict[str, float]]:
    """(token share, energy share per neuron; the same two pooled) by sign quadrant of (a, b)."""
    h, n, m = apply(g, a, b), len(a), len(w)
    count = {q: [0.0] * m for q in QUADRANTS}
    energy = {q: [0.0] * m for q in QUADRANTS}
    for t in range(n):
        for j in range(m):
            q = ("p" if a[t][j] > 0 else "n") + ("p" if b[t][j] > 0 else "n")
            count[q][j] += 1
            energy[q][j] += h[t][j] * h[t][j]
    total = [sum(energy[q][j] for q in QUADRANTS) for j in range(m)]
    tokens = {q: [ratio(c, n) for c in count[q]] for q in QUADRANTS}
    return (
        tokens,
        {q: [ratio(e, s) for e, s in zip(energy[q], total)] for q in QUADRANTS},
        {q: ratio(dot(w, tokens[q]), dot(w, [1.0] * m)) for q in QUADRANTS},
        {q: ratio(dot(w, energy[q]), dot(w, total)) for q in QUADRANTS},
    )


def gate_positive(a: Grid, w: Vector) -> tuple[list[float], float]:
    """Share of tokens with a > 0 per neuron; layer sum_j w_j share_j / sum_j w_j."""
    shares = [ratio(sum(1 for x in column(a, j) if x > 0), len(a)) for j in range(len(w))]
    return shares, ratio(dot(w, shares), dot(w, [1.0] * len(w)))


def moments(a: Grid, b: Grid) -> dict[str, list[float]]:
    """mean_a, mean_b, std_a, std_b (population), corr_ab: each a list over neurons."""
    m: dict[str, list[float]] = {x: [] for x in ("mean_a", "mean_b", "std_a", "std_b", "corr_ab")}
    for j in range(len(a[0])):
        x, y = column(a, j), column(b, j)
        n, mean_x, mean_y = len(x), math.fsum(x) / len(x), math.fsum(y) / len(y)
        dx, dy = [v - mean_x for v in x], [v - mean_y for v in y]
        std_x, std_y = math.sqrt(dot(dx, dx) / n), math.sqrt(dot(dy, dy) / n)
        corr = ratio(dot(dx, dy) / n, std_x * std_y)
        for values, value in zip(m.values(), (mean_x, mean_y, std_x, std_y, corr)):
            values.append(value)
    return m


def energy_share(g: Unit, a: Grid, b: Grid, w: Vector) -> list[float]:
    """w_j sum h_j^2 / sum_j' w_j' sum h_j'^2."""
    h = apply(g, a, b)
    energy = [float(w[j]) * dot(column(h, j), column(h, j)) for j in range(len(w))]
    return [ratio(e, math.fsum(energy)) for e in energy]


def top_token_share(g: Unit, a: Grid, b: Grid, w: Vector) -> float:
    """Largest over tokens of sum_j w_j h_tj^2, divided by its sum over tokens."""
    energy = [dot(w, [x * x for x in row]) for row in apply(g, a, b)]
    return ratio(max(energy), math.fsum(energy))


def repaired_null(g: Unit, a: Grid, b: Grid, w: Vector, partner: Sequence[int]) -> Comparison:
    """Exchange with b_j replaced by b_partner[j]; the weights stay w_j."""
    return exchange(g, a, [[row[partner[j]] for j in range(len(w))] for row in b], w)


def repaired_balanced_null(g: Unit, a: Grid, b: Grid, w: Vector, q: Grid, k: Grid, partner: Sequence[int]) -> Comparison:
    """Exchange of neuron i with the b of p = partner[i], whose key is first brought to the length
    and side of q_i; h counts in the balanced gauge of neuron i itself.  q, k: one row a neuron."""
    h, swapped = [[0.0] * len(w) for _ in a], [[0.0] * len(w) for _ in a]
    for i, p in enumerate(partner):
        beta, own = balance(q[i], k[p]), balance(q[i], k[i])
        for t in range(len(a)):
            x, y = float(a[t][i]), beta * float(b[t][p])
            h[t][i], swapped[t][i] = g(x, y) / own, g(y, x) / own
    return compare(h, swapped, w)


def balance(q: Vector, k: Vector) -> float:
    """|q|/|k| with the sign of q . k."""
    return math.copysign(math.sqrt(dot(q, q) / dot(k, k)), dot(q, k))


def everyone_else(a: Grid, b: Grid, k: Grid | None) -> tuple[Grid, Grid]:
    """Every pair of a neuron's a with the b of another neuron, one row a token and distance in
    the order of neurons.  With keys k, the other's is brought to the length of the neuron's own."""
    m = len(a[0])
    length = [1.0] * m if k is None else [math.sqrt(dot(row, row)) for row in k]
    rows_a, rows_b = [], []
    for t in range(len(a)):
        for shift in range(1, m):
            others = [(i + shift) % m for i in range(m)]
            rows_a.append(a[t])
            rows_b.append([b[t][p] * length[i] / length[p] for i, p in enumerate(others)])
    return rows_a, rows_b


def gaussian_null(g: Unit, m: dict[str, list[float]], w: Vector, n: int, seed: int = 0) -> tuple[list[float], float]:
    """Exchange asymmetry (per neuron, pooled) for (a, b) bivariate normal with moments m, by
    n draws each (one generator runs through the neurons).  A nan correlation counts as 0."""
    rng, asymmetry, numerators, denominators = random.Random(seed), [], [], []
    for j in range(len(w)):
        mean_a, mean_b, std_a, std_b, rho = (float(m[key][j]) for key in ("mean_a", "mean_b", "std_a", "std_b", "corr_ab"))
        rho = 0.0 if math.isnan(rho) else rho
        rest = math.sqrt(max(0.0, 1 - rho * rho))
        numerator = denominator = 0.0
        for _ in range(n):
            z, z_prime = rng.gauss(0, 1), rng.gauss(0, 1)
            a = mean_a + std_a * z
            b = mean_b + std_b * (rho * z + rest * z_prime)
            h, h_prime = g(a, b), g(b, a)
            numerator += (h - h_prime) * (h - h_prime) / n
            denominator += 2 * (h * h + h_prime * h_prime) / n
        asymmetry.append(ratio(numerator, denominator))
        numerators.append(numerator)
        denominators.append(denominator)
    return asymmetry, ratio(dot(w, numerators), dot(w, denominators))


def jackknife_se(numerators: Vector, denominators: Vector, skip_empty: bool = False) -> float:
    """Delete-one-block SE of sum N_k / sum D_k.  skip_empty drops the blocks with D_k = 0
    first.  nan with fewer than 2 blocks or an undefined replicate."""
    blocks = [(float(n), float(d)) for n, d in zip(numerators, denominators) if d != 0 or not skip_empty]
    count = len(blocks)
    if count < 2:
        return math.nan
    replicates = []
    for k in range(count):
        others = blocks[:k] + blocks[k + 1 :]  # N - N_k and D - D_k, without cancellation
        replicates.append(ratio(math.fsum(n for n, _ in others), math.fsum(d for _, d in others)))
    return jackknife(replicates)


def jackknife(replicates: Vector) -> float:
    """sqrt((K - 1)/K sum (R_k - mean)^2) of the K numbers without each block."""
    count = len(replicates)
    mean = math.fsum(replicates) / count
    return math.sqrt((count - 1) / count * math.fsum((r - mean) ** 2 for r in replicates))


def without_top(numerators: Vector, denominators: Vector, energies: Vector, share: float) -> float:
    """Sum N / sum D without the given share of tokens, rounded up, those of largest energy."""
    kept = sorted(range(len(energies)), key=lambda t: energies[t])[: len(energies) - math.ceil(share * len(energies))]
    return ratio(math.fsum(numerators[t] for t in kept), math.fsum(denominators[t] for t in kept))


def top_share(energies: Vector, share: float) -> float:
    """Energy of the given share of tokens, rounded up, those of largest energy, as a share of all."""
    ordered = sorted(energies, reverse=True)
    return ratio(math.fsum(ordered[: math.ceil(share * len(ordered))]), math.fsum(ordered))


def peaks(h: Sequence[Grid]) -> list[tuple[int, int]]:
    """For each neuron the (window, position) of its largest |h|, the earliest of equal ones."""
    best: list[tuple[float, int, int]] = [(-1.0, 0, 0)] * len(h[0][0])
    for window, rows in enumerate(h):
        for position, row in enumerate(rows):
            for j, x in enumerate(row):
                if abs(x) > best[j][0]:
                    best[j] = (abs(x), window, position)
    return [(window, position) for _, window, position in best]


def top_tokens(h: Sequence[Grid], w: Vector, count: int) -> list[tuple[int, int, float, int, float]]:
    """(window, position, energy, its largest neuron, that neuron's share), by energy, then by place."""
    tokens = []
    for window, rows in enumerate(h):
        for position, row in enumerate(rows):
            parts = [float(w[j]) * x * x for j, x in enumerate(row)]
            energy, neuron = math.fsum(parts), parts.index(max(parts))
            tokens.append((window, position, energy, neuron, ratio(parts[neuron], energy)))
    return sorted(tokens, key=lambda token: (-token[2], token[0], token[1]))[:count]


class Expert(NamedTuple):
    """One expert of a layer on the tokens routed to it: a[t][j], b[t][j] and the routing weight r[t]; its neurons'
    value weights w, lengths |k|, balance beta, partners and their balance by [draw][neuron]."""

    a: Grid
    b: Grid
    r: Vector
    w: Vector
    length: Vector
    beta: Vector
    partners: Sequence[Sequence[int]]
    pair_beta: Grid


Scaled = Callable[[float, float, float], float]  # g(alpha a, b / alpha), its limits at alpha = 0 and inf included


def expert_sums(
    g: Unit, scaled: Scaled, euler: Unit, e: Expert, j: int, tokens: Sequence[int], alphas: Vector, main: Vector
) -> dict[str, list[float]]:
    """Every sum of neuron j over these tokens, a token counting with r^2; one entry a row, as many as the name has."""
    sums: dict[str, list[float]] = {}

    def add(name: str, values: Vector) -> None:
        before = sums.get(name, [0.0] * len(values))
        sums[name] = [x + y for x, y in zip(before, values)]

    for t in tokens:
        x, y, rr = float(e.a[t][j]), float(e.b[t][j]), float(e.r[t]) ** 2
        h, beta = g(x, y), float(e.beta[j])
        add("weight", [rr])
        for name, value in (("a", x), ("b", y), ("aa", x * x), ("bb", y * y), ("ab", x * y)):
            add(name, [rr * value])
        add("hh", [rr * h * h])
        add("h_ab", [rr * h * x * y])
        add("abab", [rr * (x * y) ** 2])
        add("euler", [rr * euler(x, y) ** 2])
        balanced = g(x, beta * y) / beta
        add("balanced_hh", [rr * balanced**2])
        for name, own, other in (
            ("exchange", h, g(y, x)),
            ("placement", h, g(x * y, 1.0)),
            ("balanced_exchange", balanced, g(beta * y, x) / beta),
            ("balanced_placement", balanced, g(beta * x * y, 1.0) / beta),
        ):
            add(name, [rr * other**2])
            add(f"{name}_gap", [rr * (own - other) ** 2])
        at = [scaled(alpha, x, y) for alpha in alphas]
        add("scaling", [rr * z * z for z in at])
        add("scaling_gap", [rr * (h - z) ** 2 for z in at])
        sign = ("p" if x > 0 else "n") + ("p" if y > 0 else "n")
        for q in QUADRANTS:
            add(f"count_{q}", [1.0 if q == sign else 0.0])
            add(f"energy_{q}", [rr * h * h if q == sign else 0.0])
        others = [float(e.b[t][p]) * e.length[j] / e.length[p] for p in range(len(e.w)) if p != j]
        add("mixed_hh", [rr * math.fsum(g(x, z) ** 2 for z in others)])
        add("mixed_scaling", [rr * math.fsum(scaled(alpha, x, z) ** 2 for z in others) for alpha in alphas])
        add("mixed_product", [rr * math.fsum(g(x, z) * scaled(alpha, x, z) for z in others) for alpha in alphas])
        paired = [(float(e.b[t][row[j]]), float(factors[j])) for row, factors in zip(e.partners, e.pair_beta)]
        for name, pairs in (
            ("repaired", [(g(x, z), g(z, x)) for z, _ in paired]),
            ("repaired_balanced", [(g(x, f * z) / beta, g(f * z, x) / beta) for z, f in paired]),
        ):
            add(f"{name}_hh", [rr * own**2 for own, _ in pairs])
            add(f"{name}_exchange", [rr * other**2 for _, other in pairs])
            add(f"{name}_exchange_gap", [rr * (own - other) ** 2 for own, other in pairs])
        add("repaired_scaling", [rr * scaled(alpha, x, z) ** 2 for z, _ in paired for alpha in main])
        add("repaired_product", [rr * g(x, z) * scaled(alpha, x, z) for z, _ in paired for alpha in main])
    return sums


def geometry(q: Vector, k: Vector, v: Vector, gain: Vector) -> dict[str, float]:
    """One neuron: q and k are multiplied by the gain first; score = |q||k||v|."""
    q = [float(x) * float(s) for x, s in zip(q, gain)]
    k = [float(x) * float(s) for x, s in zip(k, gain)]
    n_q, n_k, n_v = math.sqrt(dot(q, q)), math.sqrt(dot(k, k)), math.sqrt(dot(v, v))
    return {
        "cos_qk": ratio(dot(q, k), n_q * n_k),
        "cos_qv": ratio(dot(q, v), n_q * n_v),
        "cos_kv": ratio(dot(k, v), n_k * n_v),
        "norm_q": n_q,
        "norm_k": n_k,
        "norm_v": n_v,
        "score": n_q * n_k * n_v,
    }


def geometry_layer(neurons: Sequence[dict[str, float]]) -> tuple[float, float]:
    """(mean |cos(q, k)|, max score / median score) over the layer's neurons."""
    scores = [x["score"] for x in neurons]
    return (math.fsum(abs(x["cos_qk"]) for x in neurons) / len(neurons), ratio(max(scores), median(scores)))


def sigmoid(z: float) -> float:
    """1 / (1 + exp(-z)) without overflow."""
    if z >= 0:
        return 1 / (1 + math.exp(-z))
    return math.exp(z) / (1 + math.exp(z))


def _gated(u: Scalar, du: Scalar) -> tuple[Scalar, Scalar]:
    """z sigmoid(u(z)) and its derivative."""
    return (lambda z: z * sigmoid(u(z)), lambda z: sigmoid(u(z)) + z * du(z) * sigmoid(u(z)) * sigmoid(-u(z)))


def normal_cdf(z: float) -> float:
    """Phi(z), accurate in the lower tail."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


ROOT = math.sqrt(2 / math.pi)  # gelu tanh: 0.5 z (1 + tanh(u)) = z sigmoid(2 u)
# name -> (sigma, sigma', slopes at zero, slopes at infinity); None where a slope diverges.
ACTIVATIONS: dict[str, tuple[Scalar, Scalar, Slopes | None, Slopes | None]] = {
    "identity": (lambda z: z, lambda z: 1.0, (1.0, 1.0), (1.0, 1.0)),
    "relu": (lambda z: max(z, 0.0), lambda z: 1.0 if z > 0 else 0.0, (0.0, 1.0), (0.0, 1.0)),
    "leaky_relu": (lambda z: z if z > 0 else 0.01 * z, lambda z: 1.0 if z > 0 else 0.01, (0.01, 1.0), (0.01, 1.0)),
    "relu_squared": (lambda z: max(z, 0.0) ** 2, lambda z: 2 * max(z, 0.0), (0.0, 0.0), None),
    "gelu": (
        lambda z: z * normal_cdf(z),
        lambda z: normal_cdf(z) + z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi),
        (0.5, 0.5),
        (0.0, 1.0),
    ),
    "gelu_tanh": (
        *_gated(lambda z: 2 * ROOT * (z + 0.044715 * z**3), lambda z: 2 * ROOT * (1 + 3 * 0.044715 * z * z)),
        (0.5, 0.5),
        (0.0, 1.0),
    ),
    "quick_gelu": (*_gated(lambda z: 1.702 * z, lambda z: 1.702), (0.5, 0.5), (0.0, 1.0)),
    "silu": (*_gated(lambda z: z, lambda z: 1.0), (0.5, 0.5), (0.0, 1.0)),
    "sigmoid": (sigmoid, lambda z: sigmoid(z) * sigmoid(-z), None, (0.0, 0.0)),
    "tanh": (math.tanh, lambda z: 4 * sigmoid(2 * z) * sigmoid(-2 * z), (1.0, 1.0), (0.0, 0.0)),
    "softplus": (lambda z: max(z, 0.0) + math.log1p(math.exp(-abs(z))), sigmoid, None, (0.0, 1.0)),
}
