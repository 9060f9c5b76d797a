{{- /* The spec of a pod. Arguments: root, and whether the pod has a server. */ -}}
{{- define "atom.pod" -}}
{{- $values := .root.Values -}}
{{- $grace := add $values.drainDelaySeconds $values.drainSeconds 30 -}}
terminationGracePeriodSeconds: {{ $grace }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{ toYaml $values.podSecurityContext | nindent 2 }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "hostNetwork" }}
{{- with index $values $field }}
{{ $field }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if $values.hostNetwork }}
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
containers:
  - name: atom
    image: {{ include "atom.image" .root | quote }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args:
{{- with $values.model }}
      - --model
      - {{ . | quote }}
{{- end }}
      - --drain-seconds
      - {{ $values.drainSeconds | quote }}
{{- if $values.multiNode.enabled }}
      - --nnodes
      - $(LWS_GROUP_SIZE)
      - --node-rank
      - $(LWS_WORKER_INDEX)
      - --master-addr
      - $(LWS_LEADER_ADDRESS)
{{- end }}
{{- range $values.args }}
      - {{ . | quote }}
{{- end }}
    env:
{{- with $values.auth.existingSecret }}
      - name: ATOM_API_KEY
        valueFrom: {secretKeyRef: {name: {{ . }}, key: api-key}}
{{- end }}
{{- with $values.env }}
{{ toYaml . | indent 6 }}
{{- end }}
{{- if .isServer }}
    ports:
      - {name: http, containerPort: 8000}
    # The port opens when the model is loaded: until then the pod is starting, and nobody kills it.
    startupProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 5
      failureThreshold: {{ div (add $values.startupSeconds 4) 5 }}
    # Not ready at once when the engine cannot answer; dead when it still cannot after a minute.
    readinessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 1
    livenessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    # The server closes its port at SIGTERM; the service must have stopped sending before.
    lifecycle:
      preStop: {sleep: {seconds: {{ $values.drainDelaySeconds }}}}
{{- else }}
    # A rank that ends takes the engine with it: first the server's requests end.
    lifecycle:
      preStop: {sleep: {seconds: {{ add $values.drainDelaySeconds $values.drainSeconds }}}}
{{- end }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    resources:
      requests:
{{ toYaml $values.resources.requests | indent 8 }}
{{- with $values.gpu.resource }}
        {{ . }}: {{ $values.gpu.count | quote }}
{{- end }}
      limits:
{{ toYaml $values.resources.limits | indent 8 }}
{{- with $values.gpu.resource }}
        {{ . }}: {{ $values.gpu.count | quote }}
{{- end }}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
volumes:
  - name: cache
{{- if $values.cache.existingClaim }}
    persistentVolumeClaim: {claimName: {{ $values.cache.existingClaim }}}
{{- else if $values.cache.hostPath }}
    hostPath: {path: {{ $values.cache.hostPath | quote }}, type: Directory}
{{- else }}
    emptyDir: {sizeLimit: {{ $values.cache.sizeLimit }}}
{{- end }}
  - name: tmp
    emptyDir: {}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory }}}
{{- end -}}
