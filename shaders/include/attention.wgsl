// Vectors of four from and to tensors of heads. `loads` and `stores` list (binding, its row length, the last line of a sequence).
// A head begins at element `base`, in line 0 of a sequence; e, a multiple of 4, counts its elements.
$$ for name, stride, last in loads
// Zeros past the end of the head. A line past the last is the last: what comes of it is masked or not kept, but it must be finite.
fn load_{{ name }}(base: u32, line: u32, e: u32) -> vec4f {
    let i = base + min(line, {{ last }}) * {{ stride }}u + e;
$$ if name in vec4
    let values = {{ name }}[i / 4u];
$$ else
    let values = vec4f({{ name }}[i], {{ name }}[i + 1u], {{ name }}[i + 2u], {{ name }}[i + 3u]);
$$ endif
$$ if head_dim % depth
    return select(vec4f(), values, vec4u(e) + vec4u(0u, 1u, 2u, 3u) < vec4u({{ head_dim }}u));
$$ else
    return values;
$$ endif
}
$$ endfor
$$ for name, stride, last in stores
fn store_{{ name }}(base: u32, line: u32, e: u32, values: vec4f) {
    let i = base + line * {{ stride }}u + e;
    if (line > {{ last }} || e >= {{ head_dim }}u) { return; }
$$ if name in vec4
    {{ name }}[i / 4u] = values;
$$ else
$$ for j in range(4)
    {{ "if (e + " ~ j ~ "u < " ~ head_dim ~ "u) { " if j }}{{ name }}[i + {{ j }}u] = values.{{ "xyzw"[j] }};{{ " }" if j }}
$$ endfor
$$ endif
}
$$ endfor
